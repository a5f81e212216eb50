"""`gdpa bench --host` and `--data`: what the host costs: calls of small problems, reading of data."""
