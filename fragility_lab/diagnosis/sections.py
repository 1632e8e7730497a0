"""Texts, rows of tables and figures of the page's sections, from the findings of a diagnosis."""

import shlex
from collections import Counter
from dataclasses import fields

import numpy as np
import pandas as pd
import torch
import transformers

from fragility_lab.diagnosis.bulk import bulk
from fragility_lab.diagnosis.causes import SITE_NAMES, block_shares, coherence_summary, largest, shares
from fragility_lab.diagnosis.explore import explorer
from fragility_lab.diagnosis.flips import DECODED
from fragility_lab.diagnosis.found import Diagnosis, made
from fragility_lab.diagnosis.means import (
    TARGETS,
    agreement,
    by_window,
    disagreement,
    estimate,
    helps,
    mean_of,
    means,
    nats,
)
from fragility_lab.diagnosis.needs import chooses_experts
from fragility_lab.diagnosis.options import text_of
from fragility_lab.diagnosis.plans import of_mending, price, snippet
from fragility_lab.diagnosis.request import Request
from fragility_lab.inputs.names import EMBEDDED
from fragility_lab.paths import CUSTOM
from fragility_lab.reporting import figures_diagnosis
from fragility_lab.reporting.figures import uri
from fragility_lab.reporting.tables import duration, number, percent
from fragility_quantization.recipes import get_recipe

NO_OVERFLOW = ("not a number", "division by zero", "the gradient")  # first words of failures that are no overflow
ALWAYS = ("format", "budget", "windows", "length", "attention", "probes", "seed")  # options in the page's command
MANY = 24  # bars and rows that a page shows
OFTEN = 0.3  # share of next tokens whose change is noticeable, however small the divergence
UNTRAINED = 0.8  # share of the nats of a guess: a loss above it is that of a model which does not know the text
# Levels of the page: a KL divergence in nats a token, by its upper limit: a convention, no measurement.
MEANING = {"negligible": 1e-3, "small": 1e-2, "noticeable": 1e-1, "large": np.inf}


def level_of(kl: float) -> str:
    """The word of MEANING for a KL divergence; "large" if it is not finite."""
    return next((word for word, limit in MEANING.items() if kl < limit), "large")


def headline(diagnosis: Diagnosis, measured: pd.DataFrame | None) -> dict:
    """The level of the error (a level of MEANING, "overflows" or "unmeasured"), and the numbers that it follows from.

    ``in_fp32`` counts the windows without finite numbers in fp32, ``lost`` those without them in low precision alone,
    and ``finite`` the other windows among the rows of ``measured``.
    """
    windows = pd.DataFrame() if diagnosis.prediction is None else diagnosis.prediction.windows
    lost = {*windows.window[~windows.overflow.isin(["", "the gradient"])]} if len(windows) else set()
    if diagnosis.measured is not None:
        finite = np.isfinite(diagnosis.measured[["mismatch", "kl", "loss", "reference_loss"]]).all(axis=1)
        lost = (lost | {*diagnosis.measured.window[~finite]}) - diagnosis.lost_in_fp32
    rows = diagnosis.measured if measured is None or measured.empty else measured  # none: the plan overflows in all
    left = pd.DataFrame() if rows is None else rows[~rows.window.isin(lost | diagnosis.lost_in_fp32)]
    found = dict(left[["changed", "kl", "loss", "reference_loss"]].mean()) if len(left) else {}
    level = level_of(found["kl"]) if found else "unmeasured"
    guess = np.log(diagnosis.vocabulary or np.nan)  # the loss of a model for which all tokens are alike
    guessing = found.get("reference_loss", 0) > UNTRAINED * guess
    known = {"lost": len(lost), "finite": len(left), "in_fp32": len(diagnosis.lost_in_fp32), "meaning": level}
    known |= {"guess": guess, "guessing": guessing, **found}
    often = level in ("negligible", "small") and found.get("changed", 0) > OFTEN
    return known | {"level": "overflows" if lost else "noticeable" if often else level}


def setting(diagnosis: Diagnosis) -> str:
    """The conditions that the numbers of the page hold for: format, attention and windows."""
    request, attention = diagnosis.request, {"sdpa": "fused attention (sdpa)", "eager": "eager attention"}
    windows = f"{request.windows} window{'s' * (request.windows > 1)} of {request.length} tokens"
    return ", ".join(filter(None, (request.described, attention.get(diagnosis.attention), windows)))


def command(request: Request, results: str) -> str:
    """The shell command that makes this page again, in the folder ``results`` under outputs."""
    words = [
        f"{known.name.upper()}={shlex.quote(text_of(value))}"
        for known in fields(request)
        if (value := getattr(request, known.name)) != known.default or known.name in ALWAYS
        if known.name != "format" or not request.reference_model  # which says it
    ]
    words += [f"RESULTS={shlex.quote(results)}"] * (results != EMBEDDED + CUSTOM)  # that of the Makefile
    return " ".join(["make diagnose", *words])


def effects(measured: pd.DataFrame, protected: pd.DataFrame | None) -> list[list[str]]:
    """Rows of texts: the effects of rounding on tokens, without and with the plan, from ``comparison.compare``."""
    plans, rows = {"none": measured, "recommended": protected}, []
    for name, table in plans.items():
        if table is not None:
            means = [
                estimate(mean_of(table.mismatch)),
                estimate(mean_of(table.changed, shares=True)),
                *(number(table[column].mean(), ".2e") for column in ("kl", "median_kl", "ninetieth_kl")),
            ]
            rows.append([name, *means, number(table.largest_kl.max(), ".2e"), number(table.loss.mean(), ".4f")])
    return [*rows, ["fp32", *["0"] * 6, number(measured.reference_loss.mean(), ".4f")]]


def pictures(diagnosis: Diagnosis) -> dict[str, str]:
    """The page's figures by name; a figure without data is absent."""
    found, contributions = {}, diagnosis.contributions
    if contributions is not None:
        by_site = shares(contributions, "site")
        by_site = by_site.rename(SITE_NAMES)[by_site.to_numpy() > 1e-4]
        found["sites"] = uri(figures_diagnosis.shares(by_site, "rounded in"))
    if diagnosis.drift is not None:
        named = {"none": diagnosis.drift, "recommended": diagnosis.protected_drift}
        tables = [table.assign(plan=name) for name, table in named.items() if table is not None]
        curves = pd.concat(tables, ignore_index=True)
        found["drift"] = uri(figures_diagnosis.drift(curves[np.isfinite(curves.error)]))
        points = agreement(by_window(diagnosis))
        points = points[(points[["predicted", "measured"]] > 0).all(axis=1)]  # both axes are logarithmic
        if len(points):
            target = TARGETS[diagnosis.request.measured_in][1]
            found["windows"] = uri(figures_diagnosis.windows(points, target))
    return found


def common(diagnosis: Diagnosis, results: str) -> dict:
    """The values that all sections of the page take, for the folder ``results`` under outputs."""
    request, recipe = diagnosis.request, get_recipe(diagnosis.request.format)
    kept, found = means(diagnosis)
    measured, protected = (
        None if table is None else table[kept.to_numpy()] for table in (diagnosis.measured, diagnosis.protected)
    )
    return {
        "request": request, "format": request.described, "setting": setting(diagnosis), "found": diagnosis,
        "plan": diagnosis.plan, "stored": recipe.kernels.name, "quantity": TARGETS[request.measured_in][0],
        "operands": recipe.linear.inputs.name if recipe.linear.inputs and not request.weights_only else None,
        "kept": int(kept.sum()), "means": found, "measured": measured, "protected": protected, "results": results,
    }  # fmt: skip


def of_summary(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the summary."""
    measured, found, limit = known["measured"], known["means"], TARGETS[diagnosis.request.measured_in][2]
    measures = measured is not None and len(measured) > 0
    best = found.get("measured", found.get("predicted"))
    windows = None if diagnosis.prediction is None else diagnosis.prediction.windows.query("overflow != ''")
    windows = None if windows is None else windows[~windows.window.isin(diagnosis.lost_in_fp32)]
    both = measures and "predicted" in found
    by_block = None if diagnosis.contributions is None else block_shares(diagnosis.contributions)
    still = 0
    if diagnosis.protected is not None:
        lost = ~np.isfinite(diagnosis.protected[["mismatch", "kl"]]).all(axis=1)
        still = int((lost & ~diagnosis.protected.window.isin(diagnosis.lost_in_fp32)).sum())
    return {
        "headline": headline(diagnosis, measured),
        "blocks": None if by_block is None else uri(figures_diagnosis.shares(by_block.head(4 * MANY), "block")),
        "by_site": None if by_block is None else shares(made(diagnosis.contributions), "site").rename(SITE_NAMES),
        "nothing": not diagnosis.rounds, "by_block": by_block,
        "overflowing": [] if windows is None else windows,
        "leave_range": windows is not None and not windows.overflow.str.startswith(NO_OVERFLOW).all(),
        "still_overflowing": still,
        **of_mending(diagnosis),
        "effects": effects(measured, known["protected"]) if measures else [],
        "decoded": DECODED, "bulk": bulk(diagnosis), "helps": helps(diagnosis), "limits": MEANING,
        "schemes": diagnosis.choices is not None,
        "after": level_of(known["protected"].kl.mean()) if known["protected"] is not None else "",
        "experts": diagnosis.contributions is not None and chooses_experts(diagnosis.contributions.model),
        "large": best is not None and best["mean"] > limit,
        "disagreement": disagreement(found["predicted"], best) if both else None,
    }  # fmt: skip


def of_tokens(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section on tokens."""
    return {"effects": effects(known["measured"], known["protected"] if diagnosis.rounds else None)}


def of_causes(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section on causes: figures, and the modules of the largest contributions."""
    return {"images": pictures(diagnosis), "modules": largest(made(diagnosis.contributions))}


def of_coherence(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section on errors that act together."""
    return {"coherence": coherence_summary(made(diagnosis.coherence))}


def of_range(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section on the format's range."""
    ranges = made(diagnosis.ranges).head(MANY)[["module", "kind", "nonfinite", "saturated"]]
    return {
        "ranges": ranges.to_numpy().tolist(),
        "predicts": diagnosis.contributions is not None,
        **of_remedy(diagnosis),
    }


def of_mended(diagnosis: Diagnosis) -> dict[str, str]:
    """Predicted and measured error of the windows that the remedy brings back, as far as they are known."""
    table = diagnosis.mended
    if table is None:
        return {}
    column, write = ("mismatch", percent) if diagnosis.request.measured_in == "hidden" else ("kl", nats)
    known = {"predicted": "predicted", "measured": column}
    return {name: estimate(mean_of(table[key]), write) for name, key in known.items() if key in table}


def of_remedy(diagnosis: Diagnosis) -> dict:
    """Values on overflow: the places where windows overflow, the plans that were tried, and the remedy."""
    remedy = diagnosis.remedy
    if remedy is None:
        return {"places": []}
    places = Counter(place.words for place in remedy.places.values())
    tried = [[each.plan.label, price(each.plan), each.left.words if each.left else "nothing"] for each in remedy.tried]
    return {
        "places": list(places.items()),
        "variance": any("variance of the norm" in words for words in places),
        "tried": tried,
        "remedy": remedy.plan,
        "mended": of_mended(diagnosis),
        "remedy_price": price(remedy.plan) if remedy.plan else "",
        "remedy_snippet": snippet(diagnosis.request, remedy.plan, diagnosis.attention) if remedy.plan else "",
        "epsilon": remedy.epsilon,
    }


def of_explorer(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section with the explorer of plans."""
    return {"explorer": explorer(diagnosis)}


def of_run(diagnosis: Diagnosis, known: dict) -> dict:
    """Values on how the page was made: command, seconds, versions."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return {
        "command": command(diagnosis.request, known["results"]),
        "seconds": duration(sum(diagnosis.seconds.values())),
        "versions": versions,
    }
