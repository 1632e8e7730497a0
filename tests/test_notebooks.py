"""Committed notebooks are clean: one kernel, no widget state, no machine in them, every code cell run."""

import re

import nbformat
import pytest

from fragility_core.execute import notebook_names, notebook_path
from fragility_core.lab import START, options
from fragility_core.paths import NOTEBOOKS

ALL = notebook_names()


@pytest.mark.parametrize("name", ALL)
def test_notebook_is_clean(name):
    notebook = nbformat.read(notebook_path(name), as_version=4)
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
    assert set(ALL) >= {"e1_controlled_sweeps", "e2_predictor", "pretrain_embedded"}


def links(name: str) -> set[str]:
    """Local targets of the links in the text of the notebook ``name``."""
    cells = nbformat.read(notebook_path(name), as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return set(re.findall(r"\]\((?!https?://|#)([^)#]+)\)", text))


def test_start_page_lists_every_notebook():
    assert f"--LabApp.default_url=/lab/tree/{START}" in options()
    assert links("start") == {f"{name}.ipynb" for name in ALL if f"{name}.ipynb" != START}


@pytest.mark.parametrize("name", ALL)
def test_links_lead_somewhere(name):
    folder = notebook_path(name).parent
    for target in links(name):
        assert (folder / target).exists(), target
        assert (folder / target).resolve().is_relative_to(NOTEBOOKS), f"{target} is outside of what JupyterLab serves"
