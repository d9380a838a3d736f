"""Measuring memory: `/proc`, PyTorch's statistics and profiler, NVML."""
