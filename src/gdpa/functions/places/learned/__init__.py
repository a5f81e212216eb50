"""Gradients of tables: what backward kernels add to the entries that pairs have looked up, as device code."""
