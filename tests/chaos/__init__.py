"""A real run under random faults; `python -m tests.chaos` or `make chaos`."""
