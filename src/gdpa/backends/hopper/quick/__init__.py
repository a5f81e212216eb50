"""Quick passes: the launches of an earlier call, repeated with new addresses and sizes.

The ordinary way (launch.py) decides what to launch, and remembers the launches (triton/launching.Repeated). For small
problems, where the host's time counts, going through its dozen functions takes longer than the launches themselves. So
here the known launches are looked up and repeated, and nothing is decided.

A *pass* is a function made for one problem (``forward_pass``, ``backward_pass``). It does the work and returns True; or
it returns False if anything is unusual or not known yet, which leaves the call to the ordinary way. One pass serves all
numbers of rows of one class (row_classes.py): they are its first arguments, from which it computes what the ordinary
way would: numbers of tiles and programs, sizes of buffers.

    known.py      the lookup of launches       room.py     buffers for sums of dq, by mode
    places.py     tables and lists of blocks   terms.py    the terms of row sums, before a backward
    split_kv.py   a forward with split keys

Memory for lists and rings is an UntypedStorage, which comes from torch's allocator and belongs to the current stream,
as a tensor's memory does. Only its address is needed, and making a tensor of it would take a microsecond more.
"""
