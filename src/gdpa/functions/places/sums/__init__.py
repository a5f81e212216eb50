"""Sums of scores and places for guarded code, which waits for all sums of a block, in the fewest instructions."""
