"""Notebooks as they are stored: ``make notebooks`` runs them and stores them clean, as JupyterLab saves them here."""

import sys

import nbformat

from fragility_lab.running.execute import SMOKE, execute, notebook_names, notebook_path
from fragility_lab.running.files import write_whole

WIDGET = "application/vnd.jupyter.widget-view+json"
NOISE = ("execution", "papermill", "widgets")  # metadata of a run, not of its result
PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}


def clean(notebook: dict) -> None:
    """Remove live views and metadata of the run and of the machine. A live view leaves its static twin, if any."""
    for part in (notebook, *notebook["cells"]):
        part["metadata"] = {key: value for key, value in part["metadata"].items() if value and key not in NOISE}
    if notebook["metadata"].get("kernelspec", PYTHON)["name"] == PYTHON["name"]:
        notebook["metadata"] |= {"kernelspec": PYTHON, "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        for output in list(cell.get("outputs", [])):
            data = output.get("data", {})
            if data.pop(WIDGET, None) and data.keys() <= {"text/plain"}:  # a progress bar
                cell["outputs"].remove(output)


def before_saving(model: dict, **_) -> None:
    """The hook that ``jupyter_server_config.py`` names."""
    if model["type"] == "notebook":
        clean(model["content"])


if __name__ == "__main__":
    for name in sys.argv[1:] or notebook_names():
        executed = nbformat.read(execute(name, SMOKE, {}), as_version=4)
        executed.cells = [cell for cell in executed.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
        for cell in executed.cells:
            if cell.cell_type == "code":  # progress bars come as text
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        clean(executed)
        write_whole(notebook_path(name), nbformat.writes(executed) + "\n")
