"""What tests and benchmarks share: the shapes gdpa is tried on, their inputs, and the call of the API on them."""
