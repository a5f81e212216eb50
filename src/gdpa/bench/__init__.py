"""Benchmarks, and the cases that tests and benchmarks share."""
