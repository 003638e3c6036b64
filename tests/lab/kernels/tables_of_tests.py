"""Made-up kernel tables, and folders of published ones."""

from dataclasses import replace

import numpy as np


def grid(*axes):
    return [column.ravel().astype(float) for column in np.meshgrid(*axes, indexing="ij")]


def planted(make_kernel, table, model):
    """The table with the times of a model."""
    return replace(table, time=make_kernel(table).predict(model, table))


def publish(folder, path, rows):
    """Write rows as one of aiconfigurator's tables."""
    import pandas as pd

    path = folder / "aiconfigurator" / f"{path}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
