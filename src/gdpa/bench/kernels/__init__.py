"""`gdpa bench`: time, memory and error of single calls of attention, on the cases of suite.py."""
