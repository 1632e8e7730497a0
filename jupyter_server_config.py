"""What ``make lab`` and a ``jupyter lab`` started in this folder do: open the start page, save notebooks clean."""

from pathlib import Path

c = get_config()  # noqa: F821 (Jupyter defines it)
c.ServerApp.root_dir = str(Path(__file__).parent)
c.LabApp.default_url = "/lab/tree/notebooks/start.ipynb"
c.ContentsManager.pre_save_hook = "fragility_lab.running.refresh.before_saving"
