"""Shifts u = s + leaves of functions g(u) (see places/shift.py) where g has guarded code, in the fewest instructions.

Guarded code (emission/guarded.py) begins with a vote, which waits for all u of a block.

``opening``    products of the leaves become part of the sum
``distances``  a slope times i - j as a difference of two products
``units``      u in the units that g's code begins with
``source``     the Triton code
"""
