"""Public measurements rebuilt as traces: one module per file of reference data."""
