"""Notebook 5: the effect of a larger epsilon of LayerNorm, and the actions of controllers on a recorded E5 run.

The statistics stay as recorded. Raising epsilon changes neither LayerNorm's output nor anything after it here.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from fragility_core import theory
from fragility_core.bgss import State, advance, get_policy, replay
from fragility_core.bgss.printed import PrintedBGSS
from fragility_lab.reporting.figures import COLOURS, Axes
from fragility_lessons import record
from fragility_lessons.coding import coding
from fragility_lessons.exercises import exercises
from fragility_lessons.explorers import Control, Figure
from fragility_lessons.pictures import LIMIT, Picture, finish, panels
from fragility_numerics.formats import get_format

EXERCISES = exercises("controller")
RUNS = {"steady": 6e-4, "spiking": 3e-2}  # names of the recorded runs, by their learning rate
FP16 = get_format("fp16").unit_roundoff
BASE, CAP = 1e-5, 1e-2  # epsilon before any action, and the largest that the controllers set
INTERVAL = 8  # m: the printed algorithm inspects the model every eighth step


# --- A failure ------------------------------------------------------------------------------------


def failure(step: int) -> Picture:
    """First panel: each block's share of the predicted error at ``step``, red where the release would have acted.

    Second: the share of it that epsilon at the cap would take away.
    """
    rows, acted = recorded("steady"), released("steady")
    rows, acted = rows[rows.step == step - 1].reset_index(drop=True), acted[acted.step < step]
    epsilon = rows.layer.map(acted.groupby("layer").new_epsilon.last()).fillna(BASE)
    shares, taken = rows.risk / rows.risk.sum(), raised(rows, CAP).reduction / rows.risk
    errors, falls = panels(height=3.4)
    for axes, heights in ((errors, shares), (falls, taken)):
        axes.bar(rows.layer, 100 * heights, color=["C3" if raised else "C0" for raised in epsilon > BASE])
    ticks: dict[str, Any] = {"xticks": range(0, 12, 2)}
    finish(errors, "block", "% of the predicted error", "red: the controller would raise ε", ylim=(0, 65), **ticks)
    finish(falls, "block", "% of the block's error", "what ε = 0.01 would remove", ylim=(0, 26), **ticks)
    blocks = ", ".join(map(str, sorted(set(acted.layer)))) or "none"
    reduction = raised(rows, epsilon).reduction[epsilon > BASE].sum()  # of the others it is 0, up to fp64's rounding
    saved = np.format_float_positional(100 * reduction / rows.risk.sum(), 1, fractional=False, trim="-")
    return [errors, falls], (
        f"step {step}, blocks where it would have raised ε: {blocks}. This would remove {saved} % of the predicted "
        f"error. ε = {CAP:g} would remove {100 * taken[0]:.2g} % of the error of block 0, and at most "
        f"{100 * taken[1:].max():.1g} % "
        "of that of any other block."
    )


# --- Raising epsilon, everything else frozen ------------------------------------------------------


def raised(rows: pd.DataFrame, epsilon) -> pd.DataFrame:
    """M_LN of every row ``before`` and ``after`` its epsilon becomes ``epsilon``, and the ``reduction`` of its G.

    Proposition 2 (`prop:bgss`), with everything but epsilon frozen. ``epsilon`` is a number or one for each row.
    """
    before, after = 0.0, 0.0
    for site in (1, 2):
        variance, term = rows[f"variance_{site}"], rows[f"layernorm_{site}_term"]
        scale = term / theory.layernorm_factor(variance, rows.epsilon_1)  # ||Diag(gamma)||_2 a ||x||
        before = before + term
        after = after + theory.frozen_magnitude(scale, variance, epsilon, 1.0)
    transport = rows.risk / rows.magnitude  # divided by the norm of the output
    reduction = theory.frozen_risk_reduction(before, after, transport, 1.0)
    return pd.DataFrame({"before": before, "after": after, "reduction": reduction})


def first_step() -> pd.DataFrame:
    """The rows of the first step of the steady run."""
    rows = recorded("steady")
    return rows[rows.step == 0]


def frozen(block: int, exponent: float) -> Picture:
    """First panel: M_LN of ``block`` over epsilon. Second: the share of each block's G that 10^``exponent`` takes."""
    rows, epsilon = first_step(), 10.0**exponent
    table = raised(rows, epsilon).assign(share=lambda t: t.reduction / rows.risk)
    own, here = rows.iloc[[block]], table.iloc[block]
    curve, bars = panels(height=3.6)

    sweep = np.logspace(-5, 1, 61)
    repeated = own.loc[own.index.repeat(len(sweep))].reset_index(drop=True)
    curve.plot(sweep, raised(repeated, sweep).after / here.before, color="C0")
    curve.plot(epsilon, here.after / here.before, "o", color="C3", markersize=9)
    curve.axvline(own.variance_1.item(), **LIMIT)
    curve.text(own.variance_1.item(), 1.03, "σ²\u00a0", ha="right", fontsize="small")
    curve.axvline(CAP, color="0.5", linestyle=":", linewidth=1.5)
    curve.text(CAP, 0.02, "\u00a0cap", fontsize="small")
    finish(curve, "ε", "M_LN(ε) / M_LN(10⁻⁵)", f"M_LN of block {block}", "x", ylim=(0, 1.12))

    bars.bar(rows.layer, table.share, color=["C3" if layer == block else "C0" for layer in rows.layer])
    dashes: dict[str, Any] = {"color": "0.2", "markersize": 14, "markeredgewidth": 2}
    bars.plot(rows.layer, rows.dominance, "_", label="φ, the share of M_LN", **dashes)
    labels = ("block", "share of its G", "by how much raising ε lowers G")
    finish(bars, *labels, "y", "upper right", ylim=(1e-9, 50), xticks=range(0, 12, 2))
    return [curve, bars], (
        f"block {block}, ε from {BASE:g} to {epsilon:.2g}: M_LN falls by {1 - here.after / here.before:.2g}, "
        f"G by {here.share:.2g}, the predicted mismatch by {here.reduction / rows.risk.sum():.2g} (shares of 1); "
        f"σ² = {own.variance_1.item():.2g}, φ = {own.dominance.item():.2g}"
    )


# --- How far epsilon is raised ----------------------------------------------------------------------


UPDATED = 10.0 ** np.linspace(-6, 3, 91)  # variances


def update_data() -> dict[str, Any]:
    """The data of ``update`` from which the browser computes."""
    return {"width": int(first_step().d_model.iloc[0]), "base": BASE, "variances": UPDATED.tolist()}


def update(variance_exponent: float, target: float, cap_exponent: float, precision: int) -> Picture:
    """First panel: epsilon after the printed update, over the variance. Second: rho_LN before and after the update."""
    rows = first_step()
    width, unit, cap = int(rows.d_model.iloc[0]), 2.0**-precision, 10.0**cap_exponent
    variance = np.append(UPDATED, 10.0**variance_exponent)  # the last is the chosen one
    candidate = theory.epsilon_candidate(variance, width, unit, target=target, epsilon_min=BASE, epsilon_max=cap)
    epsilon = theory.epsilon_update(BASE, candidate)
    before, after = (theory.layernorm_ratio(variance, e, width, unit) for e in (BASE, epsilon))
    bound = theory.post_update_ratio_bound(variance, width, unit, target=target, epsilon_max=cap)
    left, right = panels(height=3.8, here=variance[-1])
    left.plot(variance[:-1], epsilon[:-1], color="C0")
    left.plot(variance[-1], epsilon[-1], "o", color="C3", markersize=9)
    left.plot(rows.variance_1, np.full(len(rows), 2.2e-6), "|", color="0.2", markersize=12)
    left.text(0.3, 5e-6, "ticks: the 12 blocks", fontsize="small", ha="center")
    right.axhspan(target, 1, color="C2", alpha=0.25, linewidth=0)
    right.plot(variance[:-1], before[:-1], color="0.5", linestyle="--", label="before")
    right.plot(variance[:-1], bound[:-1], color="C3", linewidth=4, alpha=0.4, label="guarantee")
    right.plot(variance[:-1], after[:-1], color="C0", label="after")
    right.plot(variance[-1], after[-1], "o", color="C3", markersize=9)
    scales: dict[str, Any] = {"log": "xy", "xlim": (1e-6, 1e3)}
    finish(left, "σ²", "ε after the update", "ε follows σ² between base and cap", **scales, ylim=(1e-6, 2))
    finish(right, "σ²", "ρ_LN", "green: where the algorithm acts", **scales, legend="upper left", ylim=(1e-4, 1e4))
    gate, gives = ("open", "gives") if before[-1] < 1 else ("closed", "would give")
    return [left, right], (
        f"σ² = {variance[-1]:.2g}, u = 2^-{precision}: ρ_LN = {before[-1]:.3g} before, the gate ρ_LN < 1 is {gate}; "
        f"the update {gives} ε = {epsilon[-1]:.2g} and ρ_LN = {after[-1]:.3g}, guaranteed {bound[-1]:.3g}"
    )


def new_epsilon(epsilon: float, variance: float, d_model: int, u: float, target: float, cap: float) -> float:
    """epsilon of one block after the printed update and its regime gate; the old epsilon is the lower bound."""
    if theory.layernorm_ratio(variance, epsilon, d_model, u) >= 1:
        return epsilon
    bounds = {"epsilon_min": epsilon, "epsilon_max": cap}
    return theory.epsilon_update(epsilon, theory.epsilon_candidate(variance, d_model, u, target=target, **bounds))


CASES = [  # one in the band, one above it, one below it, one for which the cap is too low
    (1e-5, 1e-4, 128, 2**-11, 0.5, 1e-2),
    (1e-5, 1.0, 128, 2**-11, 0.5, 1e-2),
    (1e-5, 1e-6, 128, 2**-11, 0.5, 1e-2),
    (1e-5, 1e-4, 128, 2**-11, 0.25, 2e-5),
]
CODING = coding("controller", new_epsilon, CASES)


# --- A recorded run under the controllers -----------------------------------------------------------

GATES = ["risk", "dominance", "regime", "cooldown", "budget", "raised"]
# What stops a block at each gate, and "raised" if nothing does, with the colour that pictures give it.
STOPS = {
    "G < τ_G": (0.93, 0.93, 0.93),
    "φ < τ_φ": (0.78, 0.78, 0.78),
    "ρ_LN ≥ 1": COLOURS[3],
    "cooldown": COLOURS[9],
    "beyond budget": COLOURS[8],
    "at its target": COLOURS[4],
    "raised": COLOURS[0],
}
PASSED, FAILED, UNDECIDED = (0.75, 0.87, 0.97), (0.98, 0.82, 0.7), (1.0, 1.0, 1.0)


class Inspection(NamedTuple):
    """One inspection by the printed algorithm: the state before it, the rows of its step, the gates of every block.

    ``stop`` (layers,) has, as an index into STOPS, the first gate in the algorithm's order that each block fails.
    """

    state: State
    rows: pd.DataFrame
    gates: pd.DataFrame
    stop: np.ndarray


def with_ratio(rows: pd.DataFrame, precision: int) -> pd.DataFrame:
    """``rows`` with rho_LN for u = 2^-``precision``, the larger one of the two LayerNorms of a block."""
    variance = np.maximum(rows.variance_1, rows.variance_2)
    return rows.assign(layernorm_ratio=theory.layernorm_ratio(variance, rows.epsilon_1, rows.d_model, 2.0**-precision))


def recorded(run: str, precision: int = 11) -> pd.DataFrame:
    """The rows of one of RUNS as if the unit roundoff had been 2^-``precision``; that of the fp16 copy is 11."""
    return with_ratio(record.load(RUNS[run]), precision)


@lru_cache(maxsize=8)
def inspections(policy: PrintedBGSS, run: str, precision: int) -> list[Inspection]:
    """The recorded run under ``policy``, which inspects the steps that are multiples of INTERVAL."""
    rows = recorded(run, precision)
    seen, state = [], policy.start(rows.layer.nunique())
    for _, step in rows[(rows.step + 1) % INTERVAL == 0].groupby("step"):
        gates, signal = policy.gates(state, step), step.combined.iloc[0]
        passed = np.stack([gates[name] for name in GATES], axis=1)
        seen.append(Inspection(state, step, gates, np.where(passed.all(1), len(GATES), passed.argmin(1))))
        actions = policy.decide(state, step, signal) if gates["raised"].any() else ()
        state = advance(state, signal, actions)
    return seen


@cache
def released(run: str) -> pd.DataFrame:
    """The actions of the released controller, which inspects every step, with the parameters of the protocol."""
    rows = recorded(run)
    return replay(get_policy("bgss", base_epsilon=BASE, unit_roundoff=FP16), rows, rows[rows.layer == 0])


def playground(
    precision: int, risk: float, dominance: float, target: float, cooldown: int, budget: int, step: int, run: str
) -> Picture:
    """First panel: the gate that stops each block, by inspection, and the release's actions. Second: one inspection.

    ``risk`` and ``dominance`` are the logarithms to base 10 of the thresholds. ``cooldown`` counts inspections.
    """
    policy = PrintedBGSS(
        risk_threshold=10**risk, dominance_threshold=10**dominance, target_ratio=target, budget=budget,
        cooldown=cooldown, base_epsilon=BASE, epsilon_max=CAP,
    )  # fmt: skip
    seen, acted = inspections(policy, run, precision), released(run)
    stop = np.stack([inspection.stop for inspection in seen], axis=1)  # (layers, inspections)
    course, now = panels(5.2, 5.2, height=4.2)
    _cells(course, np.array(list(STOPS.values()))[stop], INTERVAL)
    course.plot(acted.step + 1, acted.layer, "o", color="black", markersize=5)
    course.axvline(step - INTERVAL / 2, color="black", linestyle=":")
    title = "first failed gate (dots: released controller acts)"
    finish(course, "step t", "block", title, yticks=range(0, len(stop), 2))
    _table(now, seen[step // INTERVAL - 1], policy)
    now.set_title(f"step {step}: pale blue passes, pale orange fails")
    counts = np.bincount(stop.ravel(), minlength=len(STOPS))
    return [course, now], (
        f"{run} run, u = 2^-{precision}, {stop.size} inspections of a block: "
        + ", ".join(f"{name}: {count}" for name, count in zip(STOPS, counts))
        + f". The released controller acts {len(acted)} times."
    )


CONTROLS = {
    "precision": Control.given("u = 2^-k, k (fp16: 11)", 11, range=[8, 30, 1]),
    "risk": Control.given("log10 of τ_G", 3.2, range=[0.0, 5.0, 0.1]),
    "dominance": Control.given("log10 of τ_φ", -2.3, range=[-4.0, 0.0, 0.1]),
    "target": Control.given("target ρ*", 0.5, range=[0.05, 0.95, 0.05]),
    "cooldown": Control.given("cooldown c, in inspections", 10, range=[0, 32, 1]),
    "budget": Control.given("budget B", 2, range=[0, 12, 1]),
    "step": Control.given("step t of the table", 128, range=[INTERVAL, 256, INTERVAL]),
    "run": Control("menu", "recorded run", list(RUNS), "steady"),
}
START = {name: control.start for name, control in CONTROLS.items()}
FREE = START | {"risk": 0.0, "dominance": -4.0}  # both thresholds as low as they go
TOUR: dict[str, dict[str, Any]] = {
    "1: as recorded": START,
    "2: no thresholds": FREE,
    "3: fp32": FREE | {"precision": 24},
    "4: finer than fp32": FREE | {"precision": 27},
}


def tour(stop: str) -> Picture:
    """``playground`` at one of the stops of TOUR."""
    return playground(**TOUR[stop])


def course(rows: pd.DataFrame) -> dict[str, list]:
    """The inspected steps of ``rows`` for the browser, (inspections, layers); ``ratio`` is rho_LN for u = 1."""
    inspected = rows[(rows.step + 1) % INTERVAL == 0].assign(ratio=with_ratio(rows, 0).layernorm_ratio)
    table = inspected.pivot(index="step", columns="layer")
    return {name: table[name].to_numpy().tolist() for name in ("risk", "dominance", "ratio")}


def playground_data() -> dict[str, Any]:
    """The data of ``playground`` from which the browser computes."""
    acted = {run: (released(run)[["step", "layer"]] + [1, 0]).to_numpy().tolist() for run in RUNS}
    shades = {"passed": PASSED, "failed": FAILED, "undecided": UNDECIDED}
    data: dict[str, Any] = {name: to_hex(shade) for name, shade in shades.items()}
    data |= {"names": list(STOPS), "colours": [to_hex(shade) for shade in STOPS.values()]}
    data |= {"runs": {run: course(recorded(run)) | {"acted": acted[run]} for run in RUNS}}
    return data | {"base": BASE, "cap": CAP, "interval": INTERVAL}


def free() -> Figure:
    """``playground`` with every control free."""
    return Figure(playground, CONTROLS, "controller.playground", playground_data)


def _cells(axes: Axes, shades: np.ndarray, width: float = 1) -> None:
    """Cells of the colours ``shades`` (rows, columns, 3), the first row on top, each ``width`` wide, beginning at 0."""
    rows, columns, _ = shades.shape
    axes.grid(False)
    axes.pcolormesh(width * np.arange(columns + 1), np.arange(rows + 1) - 0.5, shades)
    axes.invert_yaxis()


def _table(axes: Axes, inspection: Inspection, policy: PrintedBGSS) -> None:
    """The gates of one inspection, one row for each block, and the epsilons; below, names in the colours of STOPS."""
    gates, rows = inspection.gates, inspection.rows
    shades = [np.where(gates[name].to_numpy()[:, None], PASSED, FAILED) for name in GATES]
    shades[4][~gates.eligible] = shades[5][~gates.selected] = UNDECIDED  # for blocks that failed an earlier gate
    shades.append(np.where(gates["raised"].to_numpy()[:, None], STOPS["raised"], UNDECIDED))
    _cells(axes, np.stack(shades, 1))
    until = {action.layer: action.cooldown_until for action in inspection.state.actions}
    for block, measured in enumerate(zip(rows.risk, rows.dominance, rows.layernorm_ratio)):
        raised, wait = gates["raised"][block], until.get(block, 0) - inspection.state.step
        epsilon = gates.target[block] if raised else inspection.state.epsilon[block]
        texts = dict(enumerate(f"{value:.2g}" for value in measured))
        texts |= {3: f"{wait}"} if wait > 0 else {}
        texts |= {6: f"{epsilon:.2g}"} if epsilon > BASE else {}
        for column, text in texts.items():
            colour = "white" if raised and column == 6 else "0.15"
            axes.text(column + 0.5, block, text, ha="center", va="center", fontsize="small", color=colour)
    names = [
        f"G ≥\n{policy.risk_threshold:.2g}", f"φ ≥\n{policy.dominance_threshold:.2g}", "ρ_LN\n< 1",
        f"cooldown\nc = {policy.cooldown}", f"budget\nB = {policy.budget}", f"update\nρ* = {policy.target_ratio:.2g}",
        "raised\nto ε",
    ]  # fmt: skip
    axes.set_xticks(np.arange(len(names)) + 0.5, names, fontsize="small")
    for label, shade in zip(axes.get_xticklabels(), STOPS.values()):
        label.set_backgroundcolor(shade)
    axes.get_xticklabels()[-1].set_color("white")
    axes.set_yticks(range(0, len(rows), 2))
    axes.set_ylabel("block")
