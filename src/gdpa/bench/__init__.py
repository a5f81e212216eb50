"""Benchmarks.

kernels/ measures single calls, models/ whole steps, host/ what the host costs, tune/ kernels' configurations;
contenders/ has who is measured, report/ what is made of the results. Here is what they share: the machine, clocks,
functions, results and their format.
"""
