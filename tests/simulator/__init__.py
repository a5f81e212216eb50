"""Runs compiled kernels on a machine without a GPU, instruction by instruction, as a Hopper GPU may run them.

What Triton compiles for sm_90 is PTX. The simulator executes it: warps of 32 threads, tensor-core products, the copy
engine, barriers in shared memory and named ones, in all programs of a grid at once. Whatever may happen at any time on
a GPU happens at a random time here: which warp goes on, when a copy arrives, when a product is computed. A seed makes a
run repeatable. What a kernel must not do is an error that names the line of its source: use memory outside of the
tensors, change registers that a product still reads, wait for ever. Memory that nobody wrote is NaN, and so is, for the
copy engine and the tensor cores, what a thread wrote to shared memory without a fence after it.

What it does not model: time, registers, the weak order of memory among programs, and the hardware's approximations
(`tanh.approx` and its kind are exact here).

    ptx.py           text -> blocks of instructions
    code.py          a block -> a Python function; arithmetic.py: what single instructions compute
    warp.py          32 threads
    memory.py        shared memory, the process's own memory as the GPU's
    barriers.py      mbarriers and named barriers
    copies.py        the copy engine (TMA)
    products.py      wgmma
    groups.py        what both ask for in groups
    grid.py          programs, and who goes on when
    launching.py     gdpa's calls with tensors on the CPU, as if they were on a GPU
"""
