"""`python -m gdpa.cli`, which torchrun needs: the same as `gdpa`."""

from gdpa.cli import main

main(prog_name="gdpa")
