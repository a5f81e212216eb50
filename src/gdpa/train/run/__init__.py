"""A run: start.py opens it, loop.py goes through it, the rest is what a step and an evaluation need."""
