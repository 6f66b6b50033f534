"""`python -m minillm`."""

from minillm.cli import main

main()
