"""Calls of a kind that was there before, with numbers of rows of one class: addresses and counts are filled in.

The ordinary way (launch.py) decides what to launch and makes the launches known (see launching.Repeated). Here they are
looked up and made, and nothing else: on a problem so small that the host decides, the way through a dozen functions
takes longer than the launches. A pass is a function that tells whether it is done: whatever is unusual, or not known
yet, is left to the ordinary way. It is made for a problem, and serves all numbers of rows of the same class (see
row_classes.py), which it is given first; from them it counts what the ordinary way would: tiles, programs, rows.

Memory for lists and rings comes as an UntypedStorage, from torch's allocator and on the current stream as a tensor's
does: only its address is needed, and to make a tensor of it takes a microsecond more.
"""
