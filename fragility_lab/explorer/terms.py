"""The data behind the explorer: contributions, summed to so few terms that a browser adds them up for any plan.

The browser computes the same as ``Contributions.predict`` and ``Choices.predict``. For every term it needs the parts
that remove it. ``Contributions.vanishing`` gives them here, one part at a time.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from fragility_adjoint.mixed_precision import KEEPABLE_SITES, Contributions, Plan
from fragility_adjoint.mixed_precision.bits import Choice, Choices
from fragility_adjoint.mixed_precision.structure import ATTENTION, FP32_BITS, stored_parameters
from fragility_core.models.paths import block_of, lineage

DIGITS = 6  # significant digits of the numbers that a page carries
# The site to keep that holds the roundings at each kind of place; scores can be kept alone, too.
PARENTS = {"norm": "norms", "mlp": "mlp", "router": "mlp", "residual": "residual", "embedding": "embedding"}
PARENTS |= {"head": "head"} | dict.fromkeys(sorted(ATTENTION), "attention")
BUDGETS = 25  # of bits, along a curve
MEASURES = {"hidden": "mismatch", "kl": "kl", "logprob": "logprob"}  # columns of ``comparison.compare`` by target

Kept = TypeVar("Kept", Plan, Choice)
MeasuredPlans = Iterable[tuple[Kept, Mapping[str, float]]]


def measured_means(windows: pd.DataFrame) -> dict[str, float]:
    """The means over ``windows``, a table of ``comparison.compare``, by target; infinities are left out."""
    finite = windows.replace(np.inf, np.nan)
    return {target: float(finite[column].mean()) for target, column in MEASURES.items()}


def rounded(values) -> Any:
    """A float, or an array or list of floats as nested lists, with DIGITS significant digits."""
    if isinstance(values, float):
        return float(f"{values:.{DIGITS}g}")
    return [rounded(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def target_of(known: Contributions | Choices) -> dict[str, object]:
    """The name and unit of the predicted quantity; ``squared`` is True if its squared error itself is predicted."""
    return {"name": known.target.name, "unit": known.target.unit, "squared": known.target.squared}


class Parts:
    """The parts of a model that can be kept in fp32, numbered: blocks, branches, layers, embeddings and head.

    ``paths`` are those of modules. The residual stream and the attention scores are no modules, but flags of a plan.
    """

    def __init__(self, known: Contributions):
        structure = known.structure
        branches = chain.from_iterable(structure.sites.values())
        self.known = known
        self.paths = list(dict.fromkeys([*structure.blocks, *branches, *structure.modules]))
        self.number = {path: i for i, path in enumerate(self.paths)}

    def containing(self, path: str) -> list[int]:
        """The numbers of the parts that contain the module ``path``, outermost first."""
        return [self.number[above] for above in lineage(path) if above in self.number]

    def kept(self, plan: Plan) -> dict[str, object]:
        """The numbers of the parts that ``plan`` keeps, and its flags. Raises KeyError for a module that is no part."""
        flags = {"residual": plan.residual, "scores": plan.scores}
        return {"parts": [self.number[path] for path in plan.modules], **flags}

    @cached_property
    def sites(self) -> list[dict]:
        """The kinds of site that can be kept, each with its parts or its flag."""
        sites = self.known.structure.sites
        named = [name for name in KEEPABLE_SITES if name in sites]
        return [{"name": name, "parts": [self.number[path] for path in sites[name]]} for name in named]

    def price(self) -> list[dict]:
        """Bytes that fp32 parameters add, by group: ``all`` if each owner of the group is kept, ``some`` if not each.

        An owner is kept if one of its ``parts`` is. A norm that reads the stream is also kept beside an fp32 stream.
        """
        model, recipe = self.known.model, self.known.recipe
        summed: dict[tuple[str, ...], list[float]] = {}
        for stored in stored_parameters(model, recipe):
            both = summed.setdefault(stored.users, [0.0, 0.0])
            both[0] += stored.entries * (FP32_BITS - stored.bits) / 8
            both[1] += stored.entries * FP32_BITS / 8
        norms = set(self.known.structure.stream_norms)
        return [
            {"owners": [{"parts": self.containing(p), "stream": p in norms} for p in paths], "all": low, "some": full}
            for paths, (low, full) in summed.items()
            if any(self.containing(path) for path in paths)
        ]


def places_table(parts: Parts, known: Contributions) -> pd.DataFrame:
    """The places of ``known``, with columns that say what removes them: ``parts``, ``stream_kept``, ``scores_kept``.

    ``parts`` has a pair for every part that contains the place, outermost first: its number, and a code. Bit 0 of the
    code is set if the place no longer rounds when the part is kept, bit 1 if so beside an fp32 stream. Of several parts
    that are kept the outermost decides. If none is kept, the flags decide.
    """
    recipe, weights_only = known.recipe.name, not known.kernels_round
    modules = known.structure.places.module.tolist()
    removed: list[list[tuple[int, int]]] = [[] for _ in modules]
    residual = "residual" in known.structure.sites
    inside: dict[str, list[int]] = {path: [] for path in sorted(parts.paths, key=len)}
    for place, module in enumerate(modules):
        for path in inside.keys() & lineage(module):
            inside[path].append(place)
    for path, places in inside.items():
        alone = known.vanishing(Plan(recipe, (path,), weights_only=weights_only))
        beside = known.vanishing(Plan(recipe, (path,), residual=residual, weights_only=weights_only))
        for place in places:
            removed[place].append((parts.number[path], int(alone[place]) + 2 * int(beside[place])))
    nothing = np.zeros(len(modules), dtype=bool)
    return known.structure.places.assign(
        parts=[tuple(pairs) for pairs in removed],
        stream_kept=known.vanishing(Plan(recipe, residual=True)) if residual else nothing,
        scores_kept=known.vanishing(Plan(recipe, scores=True)) if "scores" in known.structure.sites else nothing,
    )


def terms(parts: Parts, known: Contributions) -> dict[str, object]:
    """The terms of one target. Places of one module, kind and site that the same parts remove are one term.

    ``c2`` (windows, terms) are shares of the square of the target's norm, mean over probes.
    """
    table = places_table(parts, known)
    row = table.layer.astype("string").fillna(table.site.where(table.site.isin(["embedding", "norm"]), "head"))
    keys = ["row", "site", "module", "kind", "parts", "stream_kept", "scores_kept"]
    number = table.assign(row=row).groupby(keys, sort=False, dropna=False).ngroup().to_numpy()
    first = table.assign(row=row, number=number).drop_duplicates("number").sort_values("number")
    rows, norms = known.rows, known.windows.set_index("window").norm
    term = pd.Series(number, index=table.place)
    share = rows.c2 / rows.window.map(norms) ** 2 / (rows.probe.max() + 1)
    c2 = share.groupby([rows.window, rows.place.map(term)]).sum().unstack(fill_value=0.0).sort_index(axis=1)
    modules = list(dict.fromkeys(first.module))
    listed = [
        {"row": t.row, "site": t.site, "module": modules.index(t.module), "kind": t.kind, "parts": t.parts}
        | {"stream": bool(t.stream_kept), "scores": bool(t.scores_kept)}
        for t in first.itertuples()
    ]
    return target_of(known) | {"modules": modules, "terms": listed, "c2": rounded(c2.to_numpy())}


def orders(parts: Parts, known: Contributions) -> dict[str, list]:
    """The best plans of ``Contributions.plan``, by unit, for every budget.

    Blocks and layers are in the order in which they are kept; for sites there are sets.
    """
    structure, paths = known.structure, {}
    for unit in ("blocks", "modules"):
        best = np.argsort(-known.gains(unit).gain, kind="stable")
        paths[unit] = [parts.number[getattr(structure, unit)[i]] for i in best]
    sites = [known.plan(count, "sites").label.split(", ") for count in range(1, len(structure.sites) + 1)]
    return {**paths, "sites": [[], *sites]}


def keeping(known: Sequence[Contributions], measured: MeasuredPlans[Plan] = ()) -> dict[str, object]:
    """The view in which parts are kept in fp32. ``known`` has one entry for each target, of one recipe and model.

    ``measured`` has plans with the errors that were measured, mean over windows, by the name of the target.
    """
    first, parts = known[0], Parts(known[0])
    blocks = [block[1] for block in map(block_of, first.structure.blocks) if block]
    return {
        "kind": "keep",
        "recipe": first.recipe.name,
        "length": first.length,
        "paths": parts.paths,
        "blocks": {str(n): parts.number[path] for n, path in zip(blocks, first.structure.blocks)},
        "layers": [parts.number[path] for path in first.structure.modules],
        "sites": parts.sites,
        "parents": PARENTS,
        "price": parts.price(),
        "stream_bytes": first.stream_bytes,
        "targets": [terms(parts, each) | {"best": orders(parts, each)} for each in known],
        "measured": [
            {
                "label": plan.label,
                "kept": parts.kept(plan),
                "predicted": {each.target.name: float(each.predict(plan).predicted.mean()) for each in known},
                "found": dict(found),
            }
            for plan, found in measured
        ],
    }


def choosing(known: Choices, measured: MeasuredPlans[Choice] = ()) -> dict[str, object]:
    """The view in which every group of linear layers gets a scheme, and nothing else is kept in fp32.

    ``measured`` has choices in place of plans.
    """
    blocks = [block for block in (block_of(group[0]) for group in known.groups) if block]
    return {
        "kind": "choose",
        "recipe": known.kernels,
        "schemes": known.names,
        "groups": [
            {
                "row": str(block[1]),
                "column": group[0].removeprefix(f"{block[0]}."),
                "names": [path.removeprefix(f"{block[0]}.") for path in group],
            }
            for block, group in zip(blocks, known.groups)
        ],
        "bits": rounded(known.bits.astype(float)),
        "entries": known.weights,
        "targets": [target_of(known) | {"errors": rounded(known.errors), "rest": rounded(known.others)}],
        "best": [list(choice.schemes) for choice in known.best(BUDGETS)],
        "measured": [
            {"label": f"{known.mean_bits(choice):.2f} bits", "choice": list(choice.schemes), "found": dict(found)}
            for choice, found in measured
        ],
    }
