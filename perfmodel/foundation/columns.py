"""The type of a figure of one plan or of many."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = float | NDArray[np.floating] | NDArray[np.integer]
"""A number, or an array with an entry for each plan, which broadcasts over the rest."""
