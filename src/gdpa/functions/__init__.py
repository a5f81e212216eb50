"""The function compiler: a plain torch function in, eager code and Triton source with derivatives out.

    Python function
      fingerprint.py, recent/   was it seen before? Then the rest is known (kept.py: for how long)
      tracing/                  its operations and those of its derivatives, recorded and lowered to a Graph (graph.py)
      places/                   for functions of positions and tables: these cut off as a Program of their own
    Activation                  (activation.py; traced.py is what the compiler knows of it)
      accuracy/                 which approximations are allowed, for a dtype and a target
      passes/                   Graph to Graph: costly operations expanded, constants folded, sums regrouped
      emit.py, emission/        Graph to source: Triton, or blocks of PTX for Hopper
    JitFunctions                (emit.py) which kernels take as compile-time arguments

An Activation is identified by the digest of its graph (keys.py); a mask likewise (mask.py). stored.py keeps graphs and
source on disk for later processes; documents/ is how exported programs carry them.
"""
