"""Notebook 4: the growth of an error in residual blocks, alone, in stacks, and in the embedded checkpoint.

A block is x -> x + J x with ||J||_2 = rho. A stack is a tensor of Jacobians (L, WIDTH, WIDTH); block 0 is the first.
"""

from itertools import accumulate
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fragility_core import theory
from fragility_core.surrogates.transport import TRANSPORTS
from fragility_lessons import shipped
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.pictures import LIMIT, Picture, finish, panels, strength
from fragility_lessons.rows import standard_normal

EXERCISES = exercises("residual_depth")
GAINS = torch.linspace(0, 1.5, 31, dtype=torch.float64)
WIDTH = 16
EYE = torch.eye(WIDTH, dtype=torch.float64)
TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)

# Jacobians of norm 1, equal in all blocks. Every bound of the paper has the same value for all of them.
EQUAL = {
    "one direction shared": torch.ones_like(EYE) / WIDTH,
    "half stretch, half shrink": torch.diag(1 - 2 * (torch.arange(WIDTH).double() % 2)),
    "rotation": torch.block_diag(*[TURN] * (WIDTH // 2)),
    "shrink": -EYE,
}
KINDS = ("random", *EQUAL)


def jacobians(kind: str, rho: float, blocks: int) -> Tensor:
    """J_l with ||J_l||_2 = ``rho``, (blocks, WIDTH, WIDTH), of a ``kind`` of KINDS; random ones differ."""
    if kind != "random":
        return rho * EQUAL[kind].expand(blocks, -1, -1)
    normal = standard_normal(blocks, WIDTH, WIDTH)
    return rho * (normal / torch.linalg.matrix_norm(normal, 2)[:, None, None])


def singular_values(jacobian: Tensor) -> Tensor:
    """Singular values of I + J, descending, (..., WIDTH, WIDTH) -> (..., WIDTH)."""
    return torch.linalg.svdvals(EYE + jacobian)


def course(kind: str, rho: float, blocks: int) -> pd.DataFrame:
    """The growth of an error at the input of a stack, one row for each depth 1, ..., ``blocks``.

    ``worst`` is ||prod (I + J)||_2, the growth in the worst direction. ``typical`` is the root mean square of the
    growth over all directions. ``transport`` is prod (1 + rho), which bounds both. For rho < 1 only there are
    ``condition``, kappa of the product, and its ``condition_bound`` (Corollary 1 (`cor:depth`)).
    """
    norm, factors = torch.linalg.matrix_norm, EYE + jacobians(kind, rho, blocks)
    products = torch.stack(list(accumulate(factors, lambda product, factor: factor @ product)))
    # The gain of a first block is never used, so one block more than the stack has is passed.
    transport = theory.downstream_transport(torch.full((blocks + 1,), rho, dtype=torch.float64)).flip(0)[1:]
    table = {
        "blocks": range(1, blocks + 1),
        "transport": transport,
        "worst": norm(products, 2),
        "typical": norm(products) / WIDTH**0.5,
    }
    if rho < 1:
        # The product's small singular values drown in rounding errors, those of the product of inverses do not.
        inverses = torch.stack(list(accumulate(torch.linalg.inv(factors), lambda product, factor: product @ factor)))
        table["condition"] = norm(products, 2) * norm(inverses, 2)
        gains = torch.full((blocks,), rho, dtype=torch.float64)
        table["condition_bound"] = theory.residual_condition_bound(gains).cumprod(0)
    return pd.DataFrame(table)


def condition(values: Tensor) -> Tensor:
    """kappa (...) from descending singular values (..., n), infinite if the smallest is zero up to rounding."""
    return torch.where(values[..., -1] > 1e-12, values[..., 0] / values[..., -1], torch.inf)


CODING = coding("residual_depth", lambda rho: theory.downstream_transport(torch.tensor(rho)), [([0.5, 0.2, 1.0, 0.3],)])


def one_block(rho: float, kind: str) -> Picture:
    """First panel: singular values of I + J. Second: condition number and its bound over rho."""
    unit = jacobians(kind, 1.0, 1)[0]
    low, high = theory.residual_singular_value_bounds(rho)
    here, sweep = singular_values(rho * unit), singular_values(GAINS[:, None, None] * unit)
    small = GAINS < 1
    (bars,), (curve,) = panels(4.8), panels(4.8, here=rho)
    bars.bar(range(1, WIDTH + 1), here.numpy(), color="C0")
    for bound, name in ((high, "1 + ρ"), (low, "1 − ρ")):
        bars.axhline(bound, color="C3", linewidth=1.5)
        bars.text(WIDTH + 0.8, bound + 0.04, name, fontsize="small", color="C3")
    limits: dict[str, Any] = {"xlim": (0, WIDTH + 4), "ylim": (-0.55, 2.7)}
    finish(bars, "number", "singular value", "singular values of I + J", **limits)

    curve.plot(GAINS[small], theory.residual_condition_bound(GAINS[small]), color="C3", label="(1 + ρ) / (1 − ρ)")
    curve.plot(GAINS, condition(sweep).clamp_max(1e6), ".-", color="C0", label="κ(I + J)")
    curve.axvline(1, **LIMIT)
    labels = ("ρ = ‖J‖₂ (dashed: 1)", "κ(I + J)", "condition number of the block")
    finish(curve, *labels, "y", "upper left", ylim=(0.8, 1e3))
    bound = f"bound {theory.residual_condition_bound(rho):.3g}" if rho < 1 else "without a bound, as ρ is not below 1"
    return [bars, curve], (
        f"{kind}, ρ = {rho:.2f}: singular values from {here[-1]:.3g} to {here[0]:.3g}, "
        f"κ = {condition(here):.3g}, {bound}"
    )


def depth(rho: float, blocks: int, kind: str) -> Picture:
    """First panel: growth of an error over depth, and prod (1 + rho). Second: condition number, bound, substitute."""
    table = course(kind, rho, 48)
    here = table[table.blocks == blocks].iloc[0]
    growth, conditions = panels(height=3.8, here=blocks)
    growth.plot(table.blocks, table.transport, color="C3", label="bound ∏(1 + ρ)")
    growth.plot(table.blocks, table.worst, color="C0", label="worst direction")
    growth.plot(table.blocks, table.typical, "--", color="C2", label="typical direction")
    conditions.plot(table.blocks, table.condition_bound, color="C3", label="bound ∏(1 + ρ)/(1 − ρ)")
    conditions.plot(table.blocks, table.condition, color="C0", label="κ of the product")
    conditions.plot(table.blocks, table.transport, "--", color="C1", label="∏(1 + ρ), its substitute")
    for axes, y, title in ((growth, "factor", "growth of an error"), (conditions, "κ", "condition number")):
        finish(axes, "blocks", y, title, "y", "upper left")
    return [growth, conditions], (
        f"{kind}, ρ = {rho:.2f}, {blocks} blocks: an error grows at most {here.transport:.3g}-fold by the bound, "
        f"{here.worst:.3g}-fold in the worst direction, {here.typical:.3g}-fold in a typical one; "
        f"κ = {here.condition:.3g}, bound {here.condition_bound:.3g}"
    )


# --- The embedded checkpoint ------------------------------------------------------------------

MARKERS = dict(zip(TRANSPORTS, "osD"))


def estimates() -> pd.DataFrame:
    """rho of every block of the embedded checkpoint on one window, one column for each estimator."""
    return shipped.transport()[list(TRANSPORTS)]


def factors() -> pd.DataFrame:
    """prod_{k > l} (1 + rho_k) for every block l but the last by estimator, and the measured growth of errors."""
    transport = estimates().apply(lambda rho: theory.downstream_transport(torch.tensor(rho.to_numpy())).numpy())
    return transport.join(shipped.transport()[["worst", "rounding"]].dropna(), how="right")


def failure() -> pd.DataFrame:
    """The growth of bf16's error up to the end from a few blocks on: measured, and bounded by ``operator_norm``."""
    here = factors().loc[[0, 5, 10]]
    table = pd.DataFrame(
        {"measured": here.rounding.map("{:.1f}".format), "bounded": here.operator_norm.map("{:.0e}".format)}
    )
    return table.rename_axis("rounded block")


def checkpoint(layer: int, estimator: str) -> Picture:
    """First panel: rho of every block by three estimators. Second: growth of an error, estimated and measured."""
    rho, table = estimates(), factors()
    here = table.loc[layer]
    gain, growth = panels(height=4.0, here=layer)
    for name, marker in MARKERS.items():
        strong = strength(name == estimator)
        gain.plot(rho.index, rho[name], f"{marker}-", markersize=5, label=name, **strong)
        growth.plot(table.index, table[name], f"{marker}-", markersize=5, **strong)
    gain.axhline(1, **LIMIT)
    growth.plot(table.index, table.worst, "^-", color="0.2", markersize=5, label="worst direction (measured)")
    growth.plot(table.index, table.rounding, "*-", color="C3", markersize=8, label="bf16 rounding (measured)")
    right = ("factor", "growth of an error up to the end", (0.5, 1e12))
    for axes, (y, title, limits) in ((gain, ("ρ", "gain of every block", (0.1, 1e9))), (growth, right)):
        finish(axes, "block", y, title, "y", "upper right", ylim=limits, xticks=range(0, len(rho), 2))
    return [gain, growth], (
        f"block {layer}, {estimator}: ρ = {rho[estimator][layer]:.3g}; an error made here grows {here[estimator]:.3g}-"
        f"fold by ∏(1 + ρ), {here.worst:.3g}-fold in the worst direction, {here.rounding:.3g}-fold if bf16 rounds it"
    )
