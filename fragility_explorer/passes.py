"""The data of the picture for E1, E2, E3 and X1: windows of single passes, and sweeps."""

import json
from functools import cache
from itertools import groupby
from typing import Any

import pandas as pd

from fragility_explorer.tables import (
    FOLDER,
    HIGHEST,
    LOWEST,
    NAMES,
    chosen_by,
    claims,
    columns,
    committed,
    rounded,
    signal_table,
    values,
)
from fragility_explorer.words import SIGNALS, in_words
from fragility_lab.reporting.tables import number

RUN = ("precision", "length", "seed")
LOG = {"log": 1, "alike": "mismatch"}
AXES = {name: {"log": 1} for name in SIGNALS} | dict.fromkeys(
    ("mismatch", "base_mismatch", "adjoint", "one_probe"), LOG
)
AXES |= {"error": {"log": 1, "percent": 1, "line": 1}, "share": {"percent": 1}, "risk": {}, "effect": {"percent": 1}}
TERMS = {
    "error": "error after the block", "share": "share of the squared error, by backward passes",
    "risk": "the block in the paper's score", "attention_term": "attention term", "layernorm_term": "LayerNorm term",
    "remainder_term": "remainder term",
}  # fmt: skip
AXES |= {"kinds": {"percent": 1}}
AXES |= {name: {"log": 1} for name in ("attention_term", "layernorm_term", "remainder_term")}
SWEEPS: dict[str, tuple[str, str, list[str], list[str], list[str]]] = {  # title, point, choices, across, upwards
    "attention": ("Attention", "margin", ["value_scale"], ["proxy", "kappa_softmax", "margin"], ["measured", "proxy"]),
    "layernorm": ("LayerNorm", "epsilon", [], ["epsilon"], ["measured", "theory"]),
    "residual": ("Residual", "rho", [], ["rho", "bound"], ["measured", "gap", "bound"]),
}
# Columns with five digits, so that few ranks are tied; the others have three, or more where values are larger.
PRECISE = {"mismatch", "combined", "adjoint", "spearman", "pairwise_accuracy", "base_mismatch"}
NOT_SHIPPED = (
    "Its text is from WikiText-2, which is not part of this project. Its errors by token and by block were not kept."
)
RINGED = "Windows with a ring have their tokens and blocks, too."


@cache
def shipped(name: str) -> dict[str, Any]:
    """The stored results of ``windows`` for a checkpoint, or its ``texts``; empty for a model without results."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def described(models: list[dict[str, Any]], words: dict[str, str], **others: Any) -> dict[str, Any]:
    """The data of the picture: ``models`` and the words for their columns."""
    names = {name for model in models for name in (*model["columns"], *(choice["key"] for choice in model["choices"]))}
    known: dict[str, Any] = {
        "of": "checkpoint",
        "point": "window",
        "points": "windows",
        "blocks": "block",
        "axes": AXES,
    }
    known |= {"models": models, "words": {name: in_words(name) for name in sorted(names)} | words}
    known |= {"ringed": RINGED, "scale": [LOWEST, HIGHEST]}
    return known | others


def windows_of(profile: str, rows: pd.DataFrame, names: tuple[str, ...]) -> dict[str, Any]:
    """Choices and columns of the windows ``rows`` of a checkpoint, and what is said of their texts."""
    found = chosen_by(rows, RUN)
    overflow = {"repeated": [[int(over), len([*same])] for over, same in groupby(rows.overflow)]}
    found["columns"] |= {"window": _windows(rows.window.tolist()), "overflow": overflow}
    found["columns"] |= {name: values(rows[name], 5 if name in PRECISE else 3) for name in names}
    return found | ({"begun": True} if shipped(profile) else {"place": NOT_SHIPPED})


def _windows(numbers: list[int]) -> list[int] | dict[str, Any]:
    """The ``numbers`` of windows, or how many a run has where each run counts from 0."""
    counted = {"counted": max(numbers) + 1, "rows": len(numbers)}
    return counted if numbers == [i % counted["counted"] for i in range(len(numbers))] else numbers


def looked_into(profile: str, rows: pd.DataFrame, series: tuple[str, ...]) -> dict[int, Any]:
    """Text, errors of tokens, and ``series`` by block of the chosen windows, by their place in ``rows``."""
    places = {key: place for place, key in enumerate(zip(*(rows[name] for name in (*RUN, "window"))))}
    details = {}
    for row in shipped(profile).get("inside", ()):
        key = tuple(row[name] for name in (*RUN, "window"))
        if key in places:
            text = "{} {} {}".format(*key[1:])
            details[places[key]] = {
                "text": text,
                "tokens": row["tokens"],
                "blocks": {name: row[name] for name in series},
            }
    return details


def texts() -> dict[str, Any]:
    """The texts of chosen windows; and the start of every window, by length and seed, with the text there."""
    return {name: shipped("texts").get(name, {}) for name in ("texts", "starts", "begins")}


def run_summaries(rows: pd.DataFrame, of: str) -> dict[str, Any]:
    """The published correlations of each run in ``rows``, and their means over all, by the places of the choices."""
    caption = "Correlation with the mismatch of windows, {}" + of
    found = {"||": signal_table(rows, caption.format(f"means over {len(rows)} runs"))}
    possible = {key: list(dict.fromkeys(rows[key])) for key in RUN}
    for place, row in rows.iterrows():
        chosen = "|".join(str(possible[key].index(row[key])) for key in RUN)
        found[chosen] = signal_table(rows.loc[[place]], caption.format("one run"))
    return found


def e1() -> dict[str, Any]:
    """E1: the points of its three sweeps."""
    models = []
    for tables in committed("e1_attention", "e1_layernorm", "e1_residual").values():
        for name, (title, point, keys, x, y) in SWEEPS.items():
            rows, found = tables[f"e1_{name}"], chosen_by(tables[f"e1_{name}"], keys)
            found["columns"] |= columns(rows, [column for column in rows if column not in keys])
            told = tables["claims"].query("experiment == 'E1' and quantity.str.startswith(@title)", engine="python")
            names = [f"{in_words(point)} {value:g}" for value in rows[point]]
            models.append(
                {"name": title, "claims": claims(told), "names": names, "x": x, "y": y, "line": not keys} | found
            )
    axes = {name: {"log": 1} for name in ("measured", "proxy", "kappa_softmax", "margin", "epsilon", "theory", "bound")}
    return described(models, {}, of="mechanism", point="point", points="points", axes=axes)


def e2() -> dict[str, Any]:
    """E2: the score and its parts against the mismatch of windows."""
    models, names = [], tuple(name for name in SIGNALS if name not in ("adjoint", "one_probe", "delta"))
    for profile, tables in committed("x1_windows", "e2_runs", "e2_claims").items():
        rows = tables["x1_windows"]
        kept, all_of = rows.groupby(list(RUN)).size().iloc[0], tables["e2_runs"].windows.max()
        note = (
            ""
            if kept == all_of
            else f"The tables keep {kept} of the {all_of} windows of each run. The claims are about all."
        )
        known: dict[str, Any] = {
            "x": list(names),
            "y": ["mismatch"],
            "details": looked_into(profile, rows, tuple(TERMS)),
        }
        known |= {"summaries": run_summaries(tables["e2_runs"], f" of {all_of} windows")}
        known |= {"name": NAMES[profile], "claims": claims(tables["e2_claims"]), "note": note}
        models.append(known | windows_of(profile, rows, ("mismatch", *names)))
    return described(models, TERMS, **texts())


def e3() -> dict[str, Any]:
    """E3: how well the score ranks the blocks of each window, and both rankings."""
    models, agreement = (
        [],
        ("spearman", "pairwise_accuracy", "mean_rank_gap", "top1_hit", "top3_overlap", "top5_overlap"),
    )
    for profile, tables in committed("e3_windows", "e3_claims").items():
        rows = tables["e3_windows"].assign(overflow=False)
        patched = {tuple(row[name] for name in (*RUN, "window")): row for row in shipped(profile).get("patched", ())}
        keys = zip(*(rows[name] for name in (*RUN, "window")))
        details = {
            place: {"blocks": {"risk": patched[key]["risk"], "effect": patched[key]["effect"]}}
            for place, key in enumerate(keys)
            if key in patched
        }
        models.append(
            {"name": NAMES[profile], "claims": claims(tables["e3_claims"]), "details": details, "x": ["base_mismatch"],
             "y": list(agreement), **windows_of(profile, rows, ("base_mismatch", *agreement))}
        )  # fmt: skip
    words = {"risk": TERMS["risk"], "effect": "mismatch that vanishes with the block in fp32"}
    words |= {"spearman": "Spearman of score and cost over blocks"}
    return described(models, words, **texts())


def _by_kind(sites: pd.DataFrame, rows: pd.DataFrame) -> dict[int, Any]:
    """The mean shares of the kinds of sites in runs of a window's format and length, by its place in ``rows``."""
    shares = sites.set_index(["precision", "length"])
    known = {key: rounded(of) for key, of in zip(shares.index, shares.to_numpy())}
    labels = [in_words(name) for name in shares]
    places = enumerate(zip(rows.precision, rows.length))
    return {
        at: {"labels": labels, "by": "kind of kernel", "blocks": {"kinds": known[key]}}
        for at, key in places if key in known
    }  # fmt: skip


def x1() -> dict[str, Any]:
    """X1: predictions by backward passes, and the score, against the mismatch of windows."""
    models, names = [], ("adjoint", "one_probe", "combined", "no_transport")
    for profile, tables in committed("x1_windows", "x1_runs", "x1_summary").items():
        rows, runs, summary = tables["x1_windows"], tables["x1_runs"], tables["x1_summary"]
        told = [
            [row.quantity, number(row.adjoint, ".3f"), number(row.score, ".3f"), f"{row.above} of {row.runs}"]
            for row in summary.itertuples()
        ]
        head = ["quantity, mean over runs", "backward passes", "the paper's score", "runs with better backward passes"]
        ratios = runs.mean_ratio
        caption = f"Predicted over measured mismatch is {ratios.min():.2f} to {ratios.max():.2f} in a run"
        models.append(
            {"name": NAMES[profile], "claims": {"head": head, "rows": told, "caption": caption}, "diagonal": True,
             "x": list(names), "y": ["mismatch"], "summaries": run_summaries(tables["x1_runs"], ""),
             "details": looked_into(profile, rows, ("share", "error", "risk")) or _by_kind(tables["x1_sites"], rows),
             **windows_of(profile, rows, ("mismatch", *names, "ratio"))}
        )  # fmt: skip
    words = {"kinds": "share of the squared error, mean over runs of this format and length"}
    words |= {"adjoint": "predicted by backward passes", "one_probe": "predicted by one backward pass"}
    return described(models, TERMS | words, **texts())
