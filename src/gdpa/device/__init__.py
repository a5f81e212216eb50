"""Triton helpers shared by the GPU backends."""
