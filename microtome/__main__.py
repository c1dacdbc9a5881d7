"""`python -m microtome`: the command line."""

from microtome.cli import main

main()
