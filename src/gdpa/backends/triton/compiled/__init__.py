"""Compiled kernels: found again in later processes, filled with other functions, made ahead and in turns."""
