"""Interactive views of results and models, on top of the lab."""
