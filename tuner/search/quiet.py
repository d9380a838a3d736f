"""Keeps from the user what Optuna says to us: imported before anything of Optuna's is made."""

import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)  # its retries while the database is away are ours to tell
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # options that we chose
