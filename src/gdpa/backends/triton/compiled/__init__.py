"""Compiled kernels: found again in later processes, filled with other functions, made one after the other."""
