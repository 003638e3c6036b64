"""The type of a figure of one plan or of many: a number, or an array with an entry for each plan (broadcast over the rest)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = float | NDArray[np.float64]
