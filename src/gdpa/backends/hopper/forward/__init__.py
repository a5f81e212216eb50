"""The forward kernel: kernel.py says how it works."""
