"""`python -m lohan` is the command line."""

from lohan.cli import main

main()
