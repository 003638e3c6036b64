"""Every notebook runs from a clean kernel, and its checks hold."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def _marks(path: Path) -> list[pytest.MarkDecorator]:
    """Return the marks of a notebook. Notebooks that measure run alone, so that no other work is in their times.

    tests/lab/pase repeats the measurement of the PaSE notebook.
    """
    alone = [pytest.mark.dist] if "WorkerGroup" in path.read_text(encoding="utf-8") else []
    return alone + [pytest.mark.nightly] * (path.stem == "pase")


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS][:1] == ["01_from_cluster_to_plan.ipynb"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [pytest.param(path, marks=_marks(path), id=path.stem) for path in NOTEBOOKS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning")
def test_notebook_runs_and_ships_with_its_outputs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in code)
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
