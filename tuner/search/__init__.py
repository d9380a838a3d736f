"""Optuna: samplers, the loop, resuming. The only package that imports it."""
