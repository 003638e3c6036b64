"""Published steps of tests/golden as cases."""

import csv
import json
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "published_steps.csv"


def published(*sources):
    """The primary cases of the sources, the first words of their ids."""
    rows = csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines())
    cases = [
        {"id": row["id"], "tier": "primary", "measured": {"step_time_s": float(row["measured_step_time_s"])}, **json.loads(row["settings"])}
        for row in rows
        if row["id"].split("-")[0] in sources
    ]
    assert cases
    return cases
