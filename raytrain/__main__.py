"""``python -m raytrain``: the command line."""

from raytrain.cli import main

main()
