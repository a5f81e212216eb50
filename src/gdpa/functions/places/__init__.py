"""Places, that is where a score stands, as functions and masks see it: positions, and tables indexed by them.

``names``    which arguments of a Python function are positions, params and tables
``tables``   a table as eager torch indexes it: bounds, negative indices, gradients of visible pairs only
``lower``    a traced function of positions and tables as a Graph (see functions/graph.py)
``program``  such a Graph with its meaning in torch, the ranges of its integers and the sides it depends on
``trace``    how functions and masks of places are recorded, and tried out on other places
``split``    a function of scores and places as a program of its places, and a function of the scores and that
``emit``     a program as Triton code, one value per pair
``classify`` a mask as Triton code that tells which tiles have no visible pair, and which have only visible ones
"""
