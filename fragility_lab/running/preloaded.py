"""Imports of the server whose forks are workers. Without garbage collection they take four fifths of the time.

The workers do not collect these objects either, so that all go on sharing their memory.
"""

import gc
from importlib import import_module

gc.disable()
for name in ("distributed.nanny", "fragility_lab.running.engine", "fragility_lab.running.remote"):
    import_module(name)
gc.freeze()
gc.enable()
