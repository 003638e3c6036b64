"""`python -m lab.left_out`."""

from lab.left_out.table import main

main()
