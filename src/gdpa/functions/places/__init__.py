"""Places: where a score stands, as functions and masks see it, that is positions, and tables indexed by them.

A function of a score and its place, f(s, params, positions, tables), is compiled in two parts (``split``): a *program*,
which computes *leaves* from positions and tables; and the function of the score, the params and the leaves, which is
compiled like any other. A mask is a program with one boolean result. A value of a program belongs to the *sides* that
it depends on: the query, the key, both (a value per pair), or neither (one per sequence and head).

``names``    which arguments of a Python function are positions, params and tables
``tables``   a table as eager torch indexes it: bounds, negative indices, gradients of visible pairs only
``lower``    a traced function of positions and tables as a Graph (see functions/graph.py)
``program``  such a Graph with its meaning in torch, the ranges of its integers and the sides it depends on
``trace``    how functions and masks of places are recorded, and tried out on other places
``split``    the two parts of a function of scores and places
``shift``    functions of the form g(s + leaves), the most common one: the *shift* s + leaves, and g
``bands``    masks that are bands (causal, windows), which kernels know better ways for
``emit``     a program as Triton code, in which values of pairs, queries and keys are tiles, columns and rows
``gather``   lookups for every pair without bounds, where a tile's ends show that all are inside
``pairs``    the same as blocks of PTX, a few scores at a time
``terms/``   the terms of shifts, added in fewer instructions
``learned/`` gradients of tables
``classify`` a mask as Triton code that tells which tiles have no visible pair, and which have only visible ones, by
``intervals``, the least and the largest value that integers have in a tile
"""
