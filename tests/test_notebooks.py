"""Committed notebooks are clean: one kernel, no widget state, no machine in them, every code cell run."""

import nbformat
import pytest

from fragility_core.paths import NOTEBOOKS

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        if cell.cell_type != "code":
            continue
        assert cell.execution_count is not None, f"not executed: {cell.source[:60]}"
        assert len(cell.source.splitlines()) <= 15, f"a cell is thin: {cell.source[:60]}"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            assert "/home/" not in str(output)
            assert "/root/" not in str(output)


def test_there_is_a_notebook_for_each_experiment():
    assert {path.stem for path in ALL} >= {"e1_controlled_sweeps", "e2_predictor", "pretrain_embedded"}
