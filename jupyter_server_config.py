"""JupyterLab for this project (``make lab``): it opens the start page and saves notebooks clean."""

from pathlib import Path

from fragility_lab.running.refresh import before_saving

c = get_config()  # noqa: F821 (Jupyter defines it)
c.ServerApp.root_dir = str(Path(__file__).parent)
c.LabApp.default_url = "/lab/tree/notebooks/start.ipynb"
c.ContentsManager.pre_save_hook = before_saving
