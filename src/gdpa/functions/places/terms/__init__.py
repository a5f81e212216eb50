"""The terms of shifts u = s + leaves of functions g(u) (see places/shift.py), added in the fewest instructions.

Where g has guarded code (emission/guarded.py), consumers wait for all u of a block, since it begins with a vote:

``opening``    products of the leaves become part of the sum
``distances``  a slope times i - j as a difference of two products
``units``      u in the units that g's code begins with
``source``     the Triton code

``bias``       terms of queries and of keys alone, for tensor cores that add them
"""
