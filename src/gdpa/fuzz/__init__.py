"""Random calls, forward and backward, against float64: `gdpa fuzz`.

draw.py turns a seed into one call, with a function from functions.py or placed.py and a mask from masks.py. tensors.py
makes its tensors, exact.py computes what they should give, compare.py judges, run.py repeats that until something is
wrong or time is up, report.py says it in words.
"""
