"""Device code shared by the GPU backends, and kernels of gdpa.rowwise.

``sequences``  where the sequences and tiles of packed tensors lie, and which blocks a band leaves visible
``rows``       tiles of rows: read, written, added to; ``products``: s = q k^T, all columns at once or a few at a time
``rounding``   where the factor of ds is applied
``parts``      sums over parts of the keys (split-KV)
``unused``     zeros in rows that belong to no sequence
``maths``      what emitted functions call: exp, tanh, erfc, ... in float32, and cheaper forms for 16-bit data
``places``     what functions and masks of positions call, and which blocks a mask leaves visible
``visits``     the same as lists of blocks, made once for a call
``once``       values looked up once per column of a tile (Gluon)
``norms``, ``segments``, ``rotary``: kernels of gdpa.rowwise, for norms, embedding gradients and rotary positions
``sources``    host code: the source of device code, found quickly
"""
