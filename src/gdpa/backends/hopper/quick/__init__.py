"""The short way of calls that repeat: launches that are known already, with new addresses and counts filled in.

The ordinary way (launch.py) decides what to launch, and remembers the launches (see launching.Repeated). Here they are
looked up and repeated, and nothing else happens: where a problem is so small that the host's time counts, going through
a dozen functions takes longer than the launches themselves. A "pass" is a function that does the work and returns True,
or returns False if anything is unusual or not known yet, which leaves the call to the ordinary way. A pass is made for
one problem and serves all numbers of rows of the same class (see row_classes.py). The numbers of rows are its first
arguments; from them it counts what the ordinary way would count: tiles, programs, rows.

Memory for lists and rings is an UntypedStorage, which comes from torch's allocator and belongs to the current stream,
as a tensor's memory does. Only its address is needed, and making a tensor of it would take a microsecond more.
"""
