"""`gdpa bench --positions`: functions of positions and tables, and masks, beside the same call without them and beside
FlexAttention, all in one run."""
