"""Which device trials run on, and how much of it one may take."""
