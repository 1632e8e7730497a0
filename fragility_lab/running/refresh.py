"""Run the notebooks with their committed defaults and store clean outputs: ``make notebooks``.

What a run leaves that is not content goes: progress bars, live views and their state, times of
execution, editors' metadata.
"""

import sys

import nbformat
from nbformat import NotebookNode

from fragility_lab.running.execute import SMOKE, execute, notebook_names, notebook_path

WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def content(output: NotebookNode) -> NotebookNode | None:
    """What ``output`` says about the result, not about the run, if anything.

    Of a live view its static counterpart stays: the figure or text that is shown without a kernel. A
    progress bar has none.
    """
    data = output.get("data", {})
    if output.get("name") == "stderr" or data.keys() == {WIDGET, "text/plain"}:
        return None
    data.pop(WIDGET, None)
    return output


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """``notebook`` with content, tags and outputs only."""
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := content(output))]
    return notebook


def refresh(name: str) -> None:
    """Execute the notebook called ``name`` and write it back, clean."""
    path = notebook_path(name)
    executed = execute(name, SMOKE, {})
    notebook = nbformat.read(executed, as_version=4)
    # Papermill may add a cell with the injected parameters; the committed notebook has none.
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    nbformat.write(cleaned(notebook), path)


def main(names: list[str]) -> None:
    for name in names or notebook_names():
        refresh(name)


if __name__ == "__main__":
    main(sys.argv[1:])
