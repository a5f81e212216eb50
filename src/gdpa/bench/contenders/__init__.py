"""Who is measured: one file per kind of contender; everybody.py lists them."""
