"""The programs behind the make targets: environment, execution of notebooks, benchmarks, JupyterLab."""
