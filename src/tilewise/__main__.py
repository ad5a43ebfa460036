"""`python -m tilewise` is the `tilewise` command."""

from tilewise.cli import main

main()
