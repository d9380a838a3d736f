"""The app: reads the database, never writes, never imports PyTorch or Optuna."""
