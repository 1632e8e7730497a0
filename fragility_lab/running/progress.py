"""Progress bars: widgets in JupyterLab, text where a notebook runs behind a terminal."""

import os

TERMINAL = "FRAGILITY_TERMINAL"  # set for kernels whose stderr is a terminal's


def progress(*args, **kwargs):
    """A tqdm bar with the arguments of ``tqdm.tqdm``, in the form that its reader can see."""
    if os.environ.get(TERMINAL):
        from tqdm import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm(*args, **kwargs)
