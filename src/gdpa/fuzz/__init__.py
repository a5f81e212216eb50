"""Random calls, forward and backward, against float64: `gdpa fuzz`.

draw.py turns a seed into one call, tensors.py makes its tensors, exact.py computes what they should give, compare.py
judges, run.py repeats that until something is wrong or time is up, report.py says it in words.
"""
