"""Run the notebooks with their committed defaults and store clean outputs: ``make notebooks``.

What a run leaves that is not content goes: progress bars, widget state, times of execution, editors'
metadata.
"""

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from fragility_core.execute import SMOKE, execute, notebook_path
from fragility_core.paths import NOTEBOOKS

WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def is_content(output: NotebookNode) -> bool:
    """Whether an output says something about the result, not about the run."""
    return output.get("name") != "stderr" and WIDGET not in output.get("data", {})


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """``notebook`` with content, tags and outputs only."""
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if is_content(output)]
    return notebook


def refresh(path: Path) -> None:
    """Execute the notebook at ``path`` and write it back, clean."""
    executed = execute(path.stem, SMOKE, {})
    notebook = nbformat.read(executed, as_version=4)
    # Papermill may add a cell with the injected parameters; the committed notebook has none.
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    nbformat.write(cleaned(notebook), path)


def main(names: list[str]) -> None:
    for path in map(notebook_path, names) if names else sorted(NOTEBOOKS.glob("*.ipynb")):
        refresh(path)


if __name__ == "__main__":
    main(sys.argv[1:])
