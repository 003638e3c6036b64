"""`python -m perfmodel.lab.left_out`."""

from perfmodel.lab.left_out.table import main

main()
