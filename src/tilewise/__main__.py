"""`python -m tilewise` is the `tilewise` command."""

from tilewise.tools.cli import main

main()
