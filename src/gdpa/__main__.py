"""``python -m gdpa``: the ``gdpa`` command, for a package that is on the path without being installed."""

from gdpa.cli import main

main(prog_name="gdpa")
