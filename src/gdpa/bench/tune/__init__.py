"""`gdpa tune`: the search for kernels' configurations on this machine."""
