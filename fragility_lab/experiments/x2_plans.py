"""X2: plans that mix schemes under a budget of bits, predicted before they are measured."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fragility_adjoint.explain.changed_choices import Competition, next_tokens
from fragility_adjoint.mixed_precision import apply
from fragility_adjoint.mixed_precision.bits import Choice, Choices, fused_layers, predictions
from fragility_lab.experiments.x2 import Evaluator
from fragility_lab.experiments.x2_flips import realised
from fragility_lab.measurement.comparison import ratio

DRAWS = 4  # of the errors of a ladder's first recipe


def plan_rows(evaluator: Evaluator, ladder: Sequence[str], budgets: int) -> pd.DataFrame:
    """One row per plan: the best choices among a ``ladder`` of recipes for so many ``budgets`` of bits, measured.

    Beside each plan is a random choice with about as many bits (``chosen_by``). ``predicted`` and ``measured`` are KL.
    The columns that begin with "changed" are the share of changed next tokens. This share is predicted from errors of
    the ladder's first recipe, times the root of the plan's predicted KL over that of the first recipe.
    """
    groups, rows = fused_layers(evaluator.model, evaluator.windows[:1]), []
    predicted_by = predictions(evaluator.model, ladder, evaluator.windows, probes=evaluator.probes)
    known = Choices(evaluator.model, predicted_by, groups)
    first, competitions = known.predict(Choice((0,) * len(groups))), next_token_competitions(evaluator, ladder[0])
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


def next_token_competitions(evaluator: Evaluator, recipe: str) -> list[Competition]:
    """The competition for next tokens in every window, with errors of ``recipe``."""
    _, realisations = realised(evaluator.model, recipe)
    return [next_tokens(realisations, window, DRAWS) for window in evaluator.windows.split(1)]


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
