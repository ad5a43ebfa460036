"""`python -m tilewise` is the `tilewise` command."""

from tilewise_cli.entry import main

main()
