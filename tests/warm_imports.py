"""What a run of `tuner` imports in the end; see warm.py."""

import click
import optuna
import sqlalchemy
import torch

import tuner.cli.main

__all__ = ["click", "optuna", "sqlalchemy", "torch", "tuner"]
