"""Predicting peak memory: trace, rules, allocator, prediction. Needs PyTorch alone."""
