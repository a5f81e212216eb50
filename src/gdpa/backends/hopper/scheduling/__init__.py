"""Which program works on which tiles: lists of tiles, which kernels make from the offsets on the device.

``schedule``  the list's kernel, and how programs go through a list in fixed shares; ``work``: its host side
``sorting``   the same list for many sequences, sorted by torch
``scanning``  tiles found among the offsets, without a list
``taking``    items taken one by one instead of fixed shares
"""
