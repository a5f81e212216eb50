"""What happens between a launch of an unknown kind and its compiled kernel.

``ahead``     launches that only compile, several at a time; ``order``: which of two threads compiles first
``finding``   compiled kernels of earlier processes, found without Triton's own key
``outlines``  a compiled kernel's PTX with another function in it: only the assembler has to run
``sharing``   PTX in which two consumers of a Hopper kernel run one copy of their code; ``scratch``: the shared memory
              that the compiler itself takes there
"""
