"""`python -m lab.pase`."""

import sys

from lab.pase.report import main

sys.exit(main())
