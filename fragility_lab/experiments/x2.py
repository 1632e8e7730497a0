"""X2: the effect of quantization on the next token, predicted and measured; not in the paper.

Every recipe is predicted in nats (KL, log-probabilities), and layer by layer. Plans that mix schemes under a budget of
bits are predicted before they are measured. ``x2_flips`` predicts changed tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor
from transformers import PreTrainedModel

from fragility_adjoint.explain.changed_choices import next_tokens
from fragility_adjoint.explain.coherence import coherence
from fragility_adjoint.explain.error_samples import ErrorSamples
from fragility_adjoint.mixed_precision import apply
from fragility_adjoint.mixed_precision.bits import Choice, Choices, fused_layers, predictions
from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_lab.experiments.realisations import dithered
from fragility_lab.inputs.loading import require_at_least
from fragility_lab.measurement.comparison import ObservedPass, compare, observe, ratio
from fragility_lab.measurement.growth import half_errors, squared
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.operands import in_rows, linear_weights, owner
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import Recipe, get_recipe

KEPT = 2**31  # bytes of logits in fp32 that stay in memory
DRAWS = 4  # of the errors of a ladder's first recipe
QUANTITIES = ("kl", "logprob")  # targets, and columns of ``comparison.compare``


@dataclass(frozen=True)
class Evaluator:
    """The fp32 model, its ``windows`` (B, T), and the number of probes; raises ValueError without probes."""

    model: PreTrainedModel
    windows: Tensor
    probes: int = 2

    def __post_init__(self):
        require_at_least(1, probes=self.probes)

    @cached_property
    def exact(self) -> list[ObservedPass]:
        """The fp32 pass of every window."""
        return [*self._passes()]

    def _passes(self) -> Iterator[ObservedPass]:
        return (observe(self.model, window[None]) for window in self.windows)

    def measure(self, low: LowPrecision) -> pd.DataFrame:
        """``comparison.compare`` of ``low`` with the fp32 passes: one row per window.

        The fp32 passes are kept for other recipes, unless their logits take too much memory.
        """
        logits = 4 * self.windows.numel() * self.model.config.get_text_config().vocab_size
        pairs = zip(self.windows[:, None], self.exact if logits <= KEPT else self._passes())
        return pd.concat([compare(observe(low.model, tokens, low), exact, tokens)[0] for tokens, exact in pairs])

    def predict(self, recipe: Recipe, target: str) -> Prediction:
        """The prediction with gradients at both ends."""
        low = lower(self.model, recipe)
        return Adjoint(low, self.model, self.probes, target=target, gradients="both")(self.windows)


def realised(model: PreTrainedModel, recipe: str) -> tuple[LowPrecision, ErrorSamples]:
    """``model`` lowered by ``recipe``, and the samples of its errors."""
    low = lower(model, get_recipe(recipe))
    return low, ErrorSamples(Adjoint(low, model, target="flips", gradients="fp32"))


def recipe_rows(evaluator: Evaluator, name: str, quantities: Sequence[str] = QUANTITIES) -> pd.DataFrame:
    """One row per quantity of the recipe ``name``: means over windows, predicted and measured, and their ratio."""
    recipe = get_recipe(name)
    found = evaluator.measure(lower(evaluator.model, recipe))
    predicted = {quantity: evaluator.predict(recipe, quantity).windows.predicted.to_numpy() for quantity in quantities}
    return pd.DataFrame([row(name, quantity, predicted[quantity], found[quantity]) for quantity in quantities])


def growth_rows(evaluator: Evaluator, name: str) -> pd.DataFrame:
    """One row per quantity of the recipe ``name``: the growth of its error with the errors inside.

    ``ratio`` is four times the squared error with half of every rounding error, over the whole squared error. It is 1
    if the error of the output grows in proportion to the errors inside, as predictions assume.
    """
    low, realisations = realised(evaluator.model, name)
    whole, half = evaluator.measure(low), half_errors(realisations, evaluator.model, evaluator.windows)
    ratios = {quantity: ratio(4 * squared(half, quantity), squared(whole, quantity)) for quantity in QUANTITIES}
    return pd.DataFrame([{"recipe": name, "quantity": quantity} | found for quantity, found in ratios.items()])


def row(recipe: str, quantity: str, predicted: np.ndarray, found: np.ndarray | pd.Series) -> dict[str, object]:
    """Means over windows, and their ratio with its interval. Windows that overflow do not count."""
    found = np.asarray(found)
    known = np.isfinite(predicted) & np.isfinite(found)
    columns = {"recipe": recipe, "quantity": quantity, "windows": int(known.sum())}
    if not known.any():
        return columns | dict.fromkeys(("predicted", "measured", "ratio", "low", "high"), np.nan)
    predicted, found = predicted[known], found[known]
    return columns | {"predicted": predicted.mean(), "measured": found.mean()} | ratio(predicted, found)


def coherence_rows(evaluator: Evaluator, name: str, probes: int) -> pd.DataFrame:
    """One row for the recipe ``name``: the measured KL over the sum of squares, and the two factors of this ratio.

    The slopes are secants, so that signed contributions add up to the error of the passes, apart from ``remainder``.
    ``overall`` is the ratio: the factor ``inside`` of groups of sites times the factor ``between`` them. Each has its
    standard error over windows. ``pairs`` counts pairs that matter. If every window overflows, only the name is there.
    """
    low = lower(evaluator.model, get_recipe(name))
    finite = (observe(low.model, window[None], low).logits.isfinite().all() for window in evaluator.windows)
    if not any(finite):
        return pd.DataFrame([{"recipe": name}])
    found = coherence(Adjoint(low, evaluator.model, probes, target="kl", gradients="secant"), evaluator.windows)
    parts = {"inside": found.inside(), "between": found.between(), "overall": found.overall()}
    columns = {"recipe": name, "measured": found.totals.mean(), "remainder": found.remainder}
    columns |= {key: ratio for key, (ratio, _) in parts.items()}
    columns |= {f"{key}_error": error for key, (_, error) in parts.items()}
    return pd.DataFrame([columns | {"pairs": int(found.pairs().matters.sum())}])


def draw_rows(evaluator: Evaluator, name: str, draws: int) -> pd.DataFrame:
    """One row for the recipe ``name``: its KL if every rounding error has a random sign, in each of ``draws``.

    ``drawn`` is the mean over draws, and ``scatter`` their standard deviation over this mean. ``ratio`` is predicted
    over drawn, with Student's interval over draws. ``beyond`` is how many standard deviations of one draw the
    ``measured`` KL lies above the mean: its errors have the signs that rounding gives them. Windows that overflow do
    not count; if all do, only the name is there.
    """
    low, realisations = realised(evaluator.model, name)
    predicted = evaluator.predict(get_recipe(name), "kl").windows.predicted.to_numpy()
    measured = evaluator.measure(low).kl.to_numpy()
    drawn = np.array([one_draw(evaluator, realisations) for _ in range(draws)])
    known = np.isfinite(predicted) & np.isfinite(measured) & np.isfinite(drawn).all(0)
    if not known.any():
        return pd.DataFrame([{"recipe": name}])
    predicted, measured, means = predicted[known].mean(), measured[known].mean(), drawn[:, known].mean(1)
    mean, deviation = means.mean(), means.std(ddof=1) if draws > 1 else np.nan
    columns = {"recipe": name, "windows": int(known.sum()), "draws": draws, "predicted": predicted, "drawn": mean}
    columns |= {"measured": measured, "scatter": deviation / mean, "beyond": (measured - mean) / deviation}
    return pd.DataFrame([columns | ratio(np.full(draws, predicted), means)])


def one_draw(evaluator: Evaluator, realisations: ErrorSamples) -> list[float]:
    """The KL of every window in one draw of signs: an error of a weight has the same sign in all windows."""
    windows = evaluator.windows.split(1)
    passes = realisations.draw(lambda model: [observe(model, window) for window in windows])
    stored: Callable = realisations.stored.round if realisations.stored else Tensor.float  # as the head stores logits
    passes = [replace(drawn, logits=stored(drawn.logits).float()) for drawn in passes]
    return [compare(*each)[0].kl.item() for each in zip(passes, evaluator.exact, windows)]


def realisation_rows(evaluator: Evaluator, name: str, realisations: int) -> pd.DataFrame:
    """One row for the recipe ``name``: its KL, predicted and measured, as means over ``realisations`` of rounding.

    In each realisation the weights are moved (``dithered``), so that rounding gives them other errors. ``ratio`` is
    predicted over measured with Student's interval over realisations, ``scatter`` the standard deviation of the ratios
    of single ones, and ``as_stored`` the ratio for the weights as they are. Those that overflow do not count; if all
    do, only the name is there.
    """
    recipe, rows = get_recipe(name), [recipe_rows(evaluator, name, ["kl"])]
    for number in range(1, realisations + 1):
        moved = replace(evaluator, model=dithered(evaluator.model, recipe, number))
        rows.append(recipe_rows(moved, name, ["kl"]))
    stored, table = rows[0].iloc[0], pd.concat(rows[1:]).dropna(subset="ratio")
    if table.empty:
        return pd.DataFrame([{"recipe": name}])
    columns = {"recipe": name, "windows": stored["windows"], "realisations": len(table), "as_stored": stored["ratio"]}
    columns |= {"predicted": table.predicted.mean(), "measured": table.measured.mean(), "scatter": table.ratio.std()}
    return pd.DataFrame([columns | ratio(table.predicted.to_numpy(), table.measured.to_numpy())])


def saturation_table(model: PreTrainedModel, recipes: Sequence[str]) -> pd.DataFrame:
    """One row for each of ``recipes`` that gives linear layers a scheme: weights that its scales leave out of range.

    ``saturated`` is the share of weights that the largest number stands for although they are farther from it than any
    rounding takes them, and ``of_error`` their share of the squared error of all weights.
    """
    rows = []
    for recipe in map(get_recipe, recipes):
        counts = []
        for path in linear_weights(model):
            scheme: Any = recipe.operands(owner(path)).weights
            if scheme is not None:
                x = in_rows(model, path)
                error = (scheme.round(x) - x).abs()
                outside = error > 0.51 * scheme.ulp(x)
                squares = error.double().square()
                counts.append([outside.sum().item(), x.numel(), squares[outside].sum().item(), squares.sum().item()])
        if counts:
            saturated, weights, theirs, whole = np.sum(counts, 0)
            rows.append({"recipe": recipe.name, "saturated": saturated / weights, "of_error": theirs / whole})
    return pd.DataFrame(rows, columns=["recipe", "saturated", "of_error"])


def layer_rows(evaluator: Evaluator, name: str) -> pd.DataFrame:
    """One row per group of fused layers: predicted and measured KL if only this group is quantized, by ``name``.

    All other kernels compute in fp32, since most layers' errors would be lost among those of bf16.
    """
    groups, rows = fused_layers(evaluator.model, evaluator.windows[:1]), []
    recipe = get_recipe(name).beside("fp32")
    choices = Choices(evaluator.model, {name: evaluator.predict(recipe, "kl")}, groups)
    for number, group in enumerate(groups):
        layers = dict.fromkeys(group, recipe.linear)
        alone = Recipe("alone", recipe.kernels, cache=recipe.cache, layers=layers, uncached=recipe.uncached)
        found = evaluator.measure(lower(evaluator.model, alone))
        rows.append(
            {"recipe": name, "layer": group[0], "predicted": choices.mean[number, 0], "measured": found.kl.mean()}
        )
    return pd.DataFrame(rows)


def layer_agreement(layers: pd.DataFrame) -> pd.DataFrame:
    """One row per recipe: Spearman's correlation of single layers' predicted and measured KL, and ratio quantiles."""
    by = layers.groupby("recipe", sort=False)
    table = by.apply(lambda rows: rows.predicted.corr(rows.measured, method="spearman"), include_groups=False)
    quantiles = by.apply(lambda rows: (rows.predicted / rows.measured).quantile([0.1, 0.5, 0.9]), include_groups=False)
    return quantiles.set_axis(["tenth", "median", "ninetieth"], axis=1).assign(spearman=table).reset_index()


def plan_rows(evaluator: Evaluator, ladder: Sequence[str], budgets: int) -> pd.DataFrame:
    """One row per plan: the best choices among a ``ladder`` of recipes, measured, at ``budgets`` numbers of bits.

    Beside each plan is a random choice with about as many bits (``chosen_by``). ``predicted`` and ``measured`` are KL.
    The columns that begin with "changed" are the share of changed next tokens. This share is predicted from errors of
    the ladder's first recipe, times the root of the plan's predicted KL over that of the first recipe.
    """
    groups, rows = fused_layers(evaluator.model, evaluator.windows[:1]), []
    predicted_by = predictions(evaluator.model, ladder, evaluator.windows, probes=evaluator.probes)
    known = Choices(evaluator.model, predicted_by, groups)
    first, (_, realisations) = known.predict(Choice((0,) * len(groups))), realised(evaluator.model, ladder[0])
    competitions = [next_tokens(realisations, window, DRAWS) for window in evaluator.windows.split(1)]
    most = known.bits.max(1).sum() / known.weights
    for number, budget in enumerate(np.linspace(known.least_bits, most, budgets + 1)[:-1]):
        best = known.within_bits(float(budget) * (1 + 1e-9))
        for chosen_by, choice in (("prediction", best), ("chance", at_random(known, float(budget), number))):
            found = evaluator.measure(apply(evaluator.model, known.plan(choice)))
            predicted = known.predict(choice)
            scales = (predicted / first) ** 0.5
            changed = np.array([window.share(scale) for window, scale in zip(competitions, scales, strict=True)])
            changes = {"predicted": changed.mean(), "measured": found.changed.mean()}
            changes |= ratio(changed, found.changed.to_numpy())
            rows.append(
                {"schemes": " ".join(ladder), "bits": known.mean_bits(choice), "chosen_by": chosen_by}
                | {"predicted": predicted.mean(), "measured": found.kl.mean()}
                | ratio(predicted, found.kl.to_numpy())
                | {f"changed_{key}": value for key, value in changes.items()}
            )
    return pd.DataFrame(rows)


def at_random(known: Choices, bits: float, seed: int) -> Choice:
    """A random choice: the smallest schemes for all groups, then drawn ones, group by group, that fit the budget."""
    generator = np.random.default_rng(seed)
    schemes = known.bits.argmin(1)
    for group in generator.permutation(len(schemes)):
        scheme, before = int(generator.integers(known.bits.shape[1])), schemes[group]
        schemes[group] = scheme
        if known.mean_bits(Choice(tuple(schemes))) > bits * (1 + 1e-9):
            schemes[group] = before
    return Choice(tuple(map(int, schemes)))
