"""One trial, one process: request and events as files, the worker, the launcher."""
