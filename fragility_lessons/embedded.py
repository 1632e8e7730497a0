"""One window of the embedded checkpoint in fp32, observed once for all notebooks that show the checkpoint."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor
from torch.func import jvp, vjp

from fragility_core import theory
from fragility_core.surrogates.monitor import Monitor
from fragility_core.surrogates.transport import TRANSPORTS, residual_transport
from fragility_lab.inputs.checkpoints import EMBEDDED, load_model, load_tokenizer
from fragility_lab.inputs.text import load_rows, select_windows, tokenize
from fragility_numerics.formats import get_format
from fragility_numerics.lowering import lower

LENGTH = 64  # tokens

BlockCall = tuple[Any, tuple, dict]


@cache
def window_tokens() -> Tensor:
    """The window's tokens (1, LENGTH)."""
    stream = tokenize(load_rows(EMBEDDED), load_tokenizer(EMBEDDED))
    return select_windows(stream, LENGTH, 1, seed=0)[1]


@cache
def prepared() -> tuple[Monitor, Tensor]:
    """The monitored model in fp32, and the window's tokens (1, LENGTH)."""
    return Monitor(lower(load_model(EMBEDDED, "cpu"), "fp32"), power_iteration=True), window_tokens()


@cache
def observed() -> pd.DataFrame:
    """The statistics of every block, power iterations included (``monitor.Observation.layers``)."""
    monitor, window = prepared()
    return monitor(window).layers


@cache
def calls() -> list[BlockCall]:
    """Every block and the arguments that the model calls it with."""
    monitor, window = prepared()
    seen: list[BlockCall] = []
    with ExitStack() as stack:
        for block in monitor.blocks:
            hook = block.module.register_forward_pre_hook(lambda *call: seen.append(call), with_kwargs=True)
            stack.callback(hook.remove)
        with torch.no_grad(), monitor.running():
            monitor.model.base_model(window, use_cache=False)
    return seen


def sites() -> pd.DataFrame:
    """Every LayerNorm: its layer, its site (1 or 2), and its variance, the mean over the tokens."""
    layers = observed()
    each = [layers[["layer"]].assign(site=site, variance=layers[f"variance_{site}"]) for site in (1, 2)]
    return pd.concat(each, ignore_index=True)


def matrix_readings() -> pd.DataFrame:
    """M_LN at the first LayerNorm of each block of the embedded checkpoint, by row and with the mean variance."""
    rows = []
    for block, (x, *_), _ in calls():
        norms = theory.layernorm_norms(x, block.ln_1.weight, block.ln_1.eps)
        inputs = {"row by row": norms, "mean variance": norms._replace(variance=norms.variance.mean())}
        rows.append(
            {
                name: theory.layernorm_magnitude(n.gamma_max, n.variance, block.ln_1.eps, n.input_norm).norm().item()
                for name, n in inputs.items()
            }
        )
    return pd.DataFrame(rows).rename_axis("block")


def downstream(layer: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The map from the output of block ``layer`` to the output of the last block, and its argument (1, T, d_model)."""
    (monitor, _), later = prepared(), calls()[layer + 1 :]

    def through(x: Tensor) -> Tensor:
        with monitor.running():
            for block, (_, *args), kwargs in later:
                x = block(x, *args, **kwargs)
        return x

    return through, later[0][1][0]


def worst_growth(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """||J||_2 of ``function`` at ``x``: the largest factor by which a small error of ``x`` can grow.

    Lanczos iteration with JVPs and VJPs finds it to three digits, never above the exact value.
    """
    pull_back: Callable[..., Any] = vjp(function, x)[1]

    def flat(product: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda vector: product(torch.from_numpy(vector).view_as(x)).flatten().numpy()

    operator = LinearOperator(
        (x.numel(), x.numel()), dtype=np.float32, rmatvec=flat(lambda y: pull_back(y)[0]),
        matvec=flat(lambda v: jvp(function, (x,), (v,))[1]),
    )  # fmt: skip
    start = np.ones(x.numel(), dtype=np.float32)
    return svds(operator, k=1, ncv=4, tol=0.1, v0=start, return_singular_vectors=False).item()


@torch.no_grad()
def rounding_growth(function: Callable[[Tensor], Tensor], x: Tensor, format: str) -> float:
    """The factor by which ``function`` enlarges the error of rounding ``x`` to ``format``."""
    error = get_format(format).round(x).float() - x
    return ((function(x + error) - function(x)).norm() / error.norm()).item()


@cache
def growth() -> pd.DataFrame:
    """The growth of an error from the output of each block but the last to the end.

    ``worst`` is ||prod_{k > layer} (I + J_k)||_2. ``rounding`` is the growth of the error of storing the block's
    output in bf16.
    """
    maps = [downstream(layer) for layer in range(len(calls()) - 1)]
    worst, rounding = [worst_growth(*each) for each in maps], [rounding_growth(*each, "bf16") for each in maps]
    return pd.DataFrame({"worst": worst, "rounding": rounding}).rename_axis("layer")


def _branches(block: Any, *args, **kwargs) -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "attention": lambda x: block.attn(block.ln_1(x), *args, **kwargs)[0],
        "mlp": lambda x: block.mlp(block.ln_2(x)),
    }


def transport() -> pd.DataFrame:
    """rho of every block by each of TRANSPORTS, with the columns of ``growth`` and ``along_input``."""
    gains = pd.DataFrame({name: residual_transport(observed(), name) for name in TRANSPORTS})
    return gains.rename_axis("layer").join(growth()).join(along_input())


@cache
def along_input() -> pd.DataFrame:
    """The gains of both branches of every block on their input x, and of their Jacobians J in the same direction.

    ``attention`` and ``mlp`` are ||branch(x)|| / ||x||, which the released estimator of rho takes for gains.
    ``J attention`` and ``J mlp`` are ||J x|| / ||x||. They are near 0, since LayerNorm removes the scale of x.
    """
    rows = []
    for block, (x, *args), kwargs in calls():
        row: dict[str, float] = {}
        for name, branch in _branches(block, *args, **kwargs).items():
            with prepared()[0].running():
                added, change = jvp(branch, (x,), (x,))[:2]
            row |= {name: (added.norm() / x.norm()).item(), f"J {name}": (change.norm() / x.norm()).item()}
            x = (x + added).detach()  # the MLP reads the attention's output
        rows.append(row)
    return pd.DataFrame(rows).rename_axis("layer")
