"""`python -m lab.left_out`."""

import sys

from lab.left_out.table import main

sys.exit(main())
