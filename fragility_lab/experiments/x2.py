"""X2: what quantization does to the next token, predicted and measured; not in the paper.

Every recipe is predicted in nats (KL, log-probabilities) and in changed tokens, layer by layer, and mixed plans are
predicted before they are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from fragility_core.adjoint import Adjoint, Prediction
from fragility_core.adjoint.flips import changed_share, deviations
from fragility_core.adjoint.targets import logits
from fragility_core.arithmetic.lowering import LowPrecision, lower
from fragility_core.arithmetic.recipes import Operands, Recipe, get_recipe
from fragility_core.protection import apply
from fragility_core.protection.bits import Choices, fused_layers, predictions
from fragility_lab.diagnosis.measure import next_token
from fragility_lab.inputs.loading import require_at_least
from fragility_lab.running.environment import progress

QUANTITIES = {"kl": "KL (nats a token)", "logprob": "log-probability (nats, root mean square)", "changed": "changed"}


@dataclass(frozen=True)
class Setting:
    """The fp32 model, its ``windows`` (B, T), and how it is predicted; raises ValueError without probes."""

    model: PreTrainedModel
    windows: Tensor
    probes: int = 2

    def __post_init__(self):
        require_at_least(1, probes=self.probes)

    @torch.no_grad()
    def logits(self, low: LowPrecision | None = None) -> list[Tensor]:
        """fp32 logits (T, vocabulary) of every window, in ``low`` if given."""
        if low is None:
            return [logits(self.model, window[None])[0] for window in self.windows]
        with low.running():
            return [logits(low.model, window[None])[0] for window in self.windows]

    def predict(self, recipe: Recipe, target: str) -> Prediction:
        """The prediction with gradients at both ends."""
        low = lower(self.model, recipe)
        return Adjoint(low, self.model, self.probes, target=target, gradients="both")(self.windows)


def measured(setting: Setting, exact: Sequence[Tensor], low: LowPrecision) -> pd.DataFrame:
    """One row per window: ``kl``, ``logprob`` and the share of ``changed`` most probable tokens."""
    rows = []
    for tokens, a, b in zip(setting.windows, exact, setting.logits(low)):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        change = next_token(q[None], tokens[None]) - next_token(p[None], tokens[None])
        kl, changed = (p.exp() * (p - q)).sum(-1).mean(), (a.argmax(-1) != b.argmax(-1)).float().mean()
        rows.append({"kl": float(kl), "logprob": float(change.square().mean().sqrt()), "changed": float(changed)})
    return pd.DataFrame(rows)


def ratio(predicted: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """The ratio of the means over windows with its 95 % interval: Student's, of the residuals (Cochran 1977, 6.10)."""
    mean = predicted.mean() / found.mean() if found.mean() else np.nan
    if len(found) < 2 or np.isnan(mean):
        return {"ratio": mean, "low": np.nan, "high": np.nan}
    error = (predicted - mean * found).std(ddof=1) / len(found) ** 0.5 / found.mean()
    half = stats.t.ppf(0.975, len(found) - 1) * error
    return {"ratio": mean, "low": mean - half, "high": mean + half}


def recipe_table(setting: Setting, recipes: Sequence[str]) -> pd.DataFrame:
    """One row per recipe and quantity: means over windows, predicted and measured, and their ratio."""
    exact, rows = setting.logits(), []
    for name in progress(recipes, desc="recipes"):
        recipe = get_recipe(name)
        found = measured(setting, exact, lower(setting.model, recipe))
        known = {target: setting.predict(recipe, target).windows.predicted for target in ("kl", "logprob")}
        spread = deviations(setting.predict(recipe, "margin"))
        known["changed"] = pd.Series([changed_share(a, s, recipe.kernels) for a, s in zip(exact, spread)])
        for quantity in QUANTITIES:
            predicted, here = known[quantity].to_numpy(), found[quantity].to_numpy()
            row = {"recipe": name, "quantity": quantity, "predicted": predicted.mean(), "measured": here.mean()}
            rows.append(row | ratio(predicted, here))
    return pd.DataFrame(rows)


def layer_table(setting: Setting, recipes: Sequence[str]) -> pd.DataFrame:
    """One row per recipe and group of fused layers: the KL if that group alone is quantized, predicted and measured.

    All other kernels compute in fp32: beside bf16 the error of most layers alone could not be seen.
    """
    exact, groups, rows = setting.logits(), fused_layers(setting.model, setting.windows[:1]), []
    for name in recipes:
        recipe = get_recipe(name).beside("fp32")
        choices = Choices(setting.model, {name: setting.predict(recipe, "kl")}, groups)
        for number, group in enumerate(progress(groups, desc=f"single layers in {name}")):
            alone = replace(recipe, name="alone", linear=Operands(), layers=dict.fromkeys(group, recipe.linear))
            found = measured(setting, exact, lower(setting.model, alone))
            rows.append(
                {"recipe": name, "layer": group[0], "predicted": choices.mean[number, 0], "measured": found.kl.mean()}
            )
    return pd.DataFrame(rows)


def layer_agreement(layers: pd.DataFrame) -> pd.DataFrame:
    """By recipe: Spearman's correlation of predicted and measured KL of single layers, and quantiles of their ratio."""
    by = layers.groupby("recipe", sort=False)
    table = by.apply(lambda rows: rows.predicted.corr(rows.measured, method="spearman"), include_groups=False)
    quantiles = by.apply(lambda rows: (rows.predicted / rows.measured).quantile([0.1, 0.5, 0.9]), include_groups=False)
    return quantiles.set_axis(["tenth", "median", "ninetieth"], axis=1).assign(spearman=table).reset_index()


def plan_table(setting: Setting, ladders: Sequence[Sequence[str]], budgets: int) -> pd.DataFrame:
    """One row per plan: for each ladder of recipes the best choices under ``budgets`` numbers of bits, measured.

    Beside each plan is a random choice with about as many bits (``chosen_by``).
    """
    exact, groups, rows = setting.logits(), fused_layers(setting.model, setting.windows[:1]), []
    for ladder in ladders:
        known = Choices(
            setting.model, predictions(setting.model, ladder, setting.windows, probes=setting.probes), groups
        )
        least, most = (known.bits.min(1).sum() / known.weights, known.bits.max(1).sum() / known.weights)
        for number, budget in enumerate(progress(np.linspace(least, most, budgets + 1)[:-1], desc="plans")):
            best = known.within_bits(float(budget) * (1 + 1e-9))
            for chosen_by, choice in (("prediction", best), ("chance", at_random(known, float(budget), number))):
                found = measured(setting, exact, apply(setting.model, known.plan(choice)))
                predicted = known.predict(choice)
                rows.append(
                    {"schemes": " ".join(ladder), "bits": known.mean_bits(choice), "chosen_by": chosen_by}
                    | {"predicted": predicted.mean(), "measured": found.kl.mean()}
                    | ratio(predicted, found.kl.to_numpy())
                )
    return pd.DataFrame(rows)


def at_random(known: Choices, bits: float, seed: int) -> list[int]:
    """Schemes drawn one group after another, each the largest that the budget still allows or a smaller one."""
    generator = np.random.default_rng(seed)
    choice = known.bits.argmin(1)
    for group in generator.permutation(len(choice)):
        scheme, before = int(generator.integers(known.bits.shape[1])), choice[group]
        choice[group] = scheme
        if known.mean_bits(choice) > bits * (1 + 1e-9):
            choice[group] = before
    return choice.tolist()
