"""From graphs to device code; emit.py beside this folder puts its parts together."""
