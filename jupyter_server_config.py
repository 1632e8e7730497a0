"""JupyterLab for this project (``make lab``): it opens the start page and saves notebooks clean.

Its own notebooks are trusted from the start, so that what needs no kernel is alive in them: bits, questions, explorers.
Those that somebody else put beside them are not, nor, where git is there to tell, in their place: their scripts wait
until the reader trusts them.
A page may ask JupyterLab for its notebooks: a question keeps the answer in the one that it stands in.
"""

import re
import shutil
import subprocess
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import get_kernel_dict
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from nbformat.sign import NotebookNotary

from fragility_lab.running.refresh import PYTHON, before_saving

PROJECT = Path(__file__).parent


def changed_in(folder: Path) -> set[str]:
    """The files in ``folder`` that are not as they were committed; none in a copy that git does not know."""
    if shutil.which("git") is None:
        return set()
    asked = ["git", "-C", str(folder), "diff", "--name-only", "--relative", "-z", "HEAD", "--", "."]
    return {*subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split("\0")}


def own_notebooks(folder: Path) -> list[Path]:
    """The project's own notebooks in ``folder``, as they were committed: the start page and those that it names."""
    changed = changed_in(folder)
    named = re.findall(r"\]\(([\w/]+\.ipynb)\)", (folder / "start.ipynb").read_text(encoding="utf-8"))
    return sorted(folder / name for name in {"start.ipynb", *named} - changed if (folder / name).is_file())


class Contents(AsyncLargeFileManager):
    """Files as they are, and notebooks with what JupyterLab adds to clean ones: else it takes them for changed."""

    async def get(self, *arguments, **options):
        model = await super().get(*arguments, **options)
        if model["type"] == "notebook" and model["content"]:
            metadata = model["content"]["metadata"]
            if metadata.get("kernelspec") == PYTHON:
                kernel = {"display_name": get_kernel_dict()["display_name"], "language": "python", "name": "python3"}
                metadata |= {"kernelspec": kernel, "language_info": IPythonKernel.language_info}
        return model


c = get_config()  # noqa: F821 (Jupyter defines it)
c.ServerApp.root_dir = str(PROJECT)
c.ServerApp.contents_manager_class = Contents
c.LabApp.default_url = "/lab/tree/notebooks/start.ipynb"
c.LabApp.expose_app_in_browser = True
c.ContentsManager.pre_save_hook = before_saving

for notebook in own_notebooks(PROJECT / "notebooks"):
    NotebookNotary().sign(nbformat.read(notebook, as_version=4))
