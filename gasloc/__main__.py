"""`python -m gasloc` is `gasloc`."""

from gasloc.cli import main

main()
