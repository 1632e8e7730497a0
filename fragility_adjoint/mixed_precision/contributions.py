"""The best plan for any budget, from one prediction."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fragility_adjoint import predictor
from fragility_adjoint.mixed_precision import structure
from fragility_adjoint.mixed_precision.knapsack import Knapsack
from fragility_adjoint.mixed_precision.plans import require_modules
from fragility_adjoint.mixed_precision.structure import Structure
from fragility_adjoint.predictor.sites import COLUMNS
from fragility_core.models.configuration import text_config
from fragility_core.models.paths import embedding_paths, head_paths, is_norm, lineage, outermost, within
from fragility_exports.plan import Plan
from fragility_quantization.operands import stored_weights

UNITS = ("blocks", "sites", "modules", "bytes")
# The last kernel counts as exact if its squared error is below this share of that of the kernel before it. A second
# rounding has at least 1/4.
NEARLY_EXACT = 1 / 8


class Contributions:
    """Contributions to the predicted mismatch of every unit of a model that can be kept in fp32.

    One prediction is enough for all plans and budgets: no further pass is run.
    """

    def __init__(self, model: nn.Module, prediction: predictor.Prediction):
        """``prediction`` is for ``model`` in low precision, ``model`` itself is in fp32.

        ``model`` gives its modules and the shapes of its parameters, and runs over a few tokens. Windows whose
        prediction is not finite are left out. Raises ValueError if no window is left, for a model without the modules
        of the prediction, and for one that is not in fp32.
        """
        modules = dict(model.named_modules(remove_duplicate=False))  # that of several owners by each of its paths
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if missing := sorted(prediction.ran - modules.keys()):
            raise ValueError(f"a plan needs the model of the prediction, got one without {', '.join(missing[:3])}")
        if dtypes != {torch.float32}:
            raise ValueError(f"a plan needs the fp32 model that was lowered, got {', '.join(sorted(map(str, dtypes)))}")
        self.model, self.recipe, self.length = model, prediction.recipe, prediction.length
        self.target = prediction.target
        known = prediction.of(prediction.finite)
        self.rows, finite = known.contributions, known.windows
        if finite.empty:
            places = ", ".join(sorted(set(prediction.windows.overflow)))
            raise ValueError(
                f"a plan needs a prediction that is finite for some window, but in {self.recipe.name} all overflow "
                f"first in {places}: choose a format of wider range than that, or mend a model with NaN"
            )
        self.windows = finite.reset_index(drop=True)
        places = self.rows[["place", *COLUMNS]].drop_duplicates("place").sort_values("place")
        self.structure = Structure(model, places.reset_index(drop=True), prediction.ran)
        squares = self.rows.c2 / self.rows.window.map(finite.set_index("window").norm ** 2)
        samples = len(finite) * (self.rows.probe.max() + 1)
        # By place: c^2 over the square of the target's norm, mean over windows and probes.
        self.relative = (squares.groupby(self.rows.place).sum() / samples).to_numpy()
        self._modules, kinds, names = (self.structure.places[column] for column in ("module", "kind", "name"))
        self._embeddings, self._heads = embedding_paths(model), head_paths(model)
        quantized = {id(weight) for weight in stored_weights(model, self.recipe).values()}
        self._schemed = {path for path in self._embeddings if id(modules[path].weight) in quantized}
        # Of a quantized matrix that embedding and head share, the head's product makes most of the error, where it ran.
        heads = {id(getattr(modules[path], "weight", None)): path for path in self._heads if path in prediction.ran}
        users = {path: heads[id(modules[path].weight)] for path in self._schemed if id(modules[path].weight) in heads}
        owners = self._modules.mask(kinds.eq("weight") & names.eq("weight"), self._modules.replace(users))
        self._number_of_module, once = pd.factorize(owners)
        self._around = [{*lineage(path)} for path in once]  # by number: the paths of a module and of what it is inside
        self._kernels = kinds.eq("kernel").to_numpy(dtype=bool)
        self.kernels_round = bool(self._kernels.any())  # or weights alone are rounded
        self._vanishing: dict[tuple[str, bool], np.ndarray] = {}  # plans ask for the same modules many times

    def vanishing(self, plan: Plan) -> np.ndarray:
        """Booleans, in the order of ``structure.places``: True where ``plan`` removes the rounding."""
        vanishing = np.zeros(len(self.structure.places), dtype=bool)
        for path in plan.modules:
            if (asked := (path, plan.residual)) not in self._vanishing:
                self._vanishing[asked] = self._vanishing_inside(*asked)
            vanishing |= self._vanishing[asked]
        if plan.residual:
            vanishing |= self._vanishing_beside_stream
        if plan.scores:
            vanishing |= self.structure.places.site.eq("scores").to_numpy()
        return vanishing

    def _vanishing_inside(self, path: str, residual: bool) -> np.ndarray:
        """The places that stop rounding if the module at ``path`` is kept, perhaps beside an fp32 stream."""
        inside, kernels = self._inside(path), self._kernels_inside(path)
        stays_fp32 = path in self._heads or (residual and path in self._embeddings)
        if self.kernels_round and self.recipe.kernels.name != "fp32" and not stays_fp32:  # its result is cast back
            if not len(kernels):  # a lookup: the cast rounds the weights again, by far less than a scheme
                return inside if path in self._schemed else np.zeros_like(inside)
            inside[self._places_of_cast(path, kernels)] = False
        if path in self._heads and len(kernels):  # what a model does with fp32 logits, such as to cap them, is in fp32
            around = self._modules.isin(["", *lineage(path)[:-1]]).to_numpy()
            inside[kernels[-1] :] |= (around & self._kernels)[kernels[-1] :]
        return inside

    @cached_property
    def _vanishing_beside_stream(self) -> np.ndarray:
        """The places that stop rounding if the residual stream is kept: its sums, and norms inside."""
        vanishing = self.structure.stream_sums.to_numpy().copy()
        for path in self.structure.stream_norms:
            kernels = self._kernels_inside(path)
            vanishing[np.setdiff1d(kernels, self._places_of_cast(path, kernels))] = True
        return vanishing

    def _places_of_cast(self, path: str, kernels: np.ndarray) -> list[int]:
        """The places that contribute as much as casting back the results of the module at ``path`` does.

        Each call of the module has one: its last kernel. If that kernel is exact, the rounding before it stands in its
        place. A norm that scales by gamma = 1 has such a kernel, and an embedding that scales by a power of two.
        """
        ends, norm = self.structure.places.ends, is_norm(self.model.get_submodule(path))
        found = []
        for position, last in enumerate(kernels):
            if not (ends[last] and within(path, ends[last])):
                continue
            before = last
            if norm:
                before = kernels[max(position - 1, 0)]
            elif path in self._embeddings:
                before = np.flatnonzero(self._modules == path)[0]  # its weights
            exact = self.relative[last] < NEARLY_EXACT * self.relative[before]
            found.append(int(before if exact else last))
        return found

    def _inside(self, path: str) -> np.ndarray:
        return np.array([path in around for around in self._around], dtype=bool)[self._number_of_module]

    def _kernels_inside(self, path: str) -> np.ndarray:
        return np.flatnonzero(self._inside(path) & self._kernels)

    def predict(self, plan: Plan) -> pd.DataFrame:
        """The ``predicted`` mismatch of every window under ``plan``, and its ``standard_error``.

        Raises ValueError for a plan of another format, or of parts that this model does not have.
        """
        if plan.format != self.recipe.name:
            raise ValueError(f"a plan must be for the format of the prediction, {self.recipe.name}, got {plan.format}")
        require_modules(self.model, plan.modules)
        self._require_sites(["residual"] * plan.residual + ["scores"] * plan.scores)
        left = self.structure.places.place[~self.vanishing(plan)]
        return predictor.predict(self.rows[self.rows.place.isin(left)], self.windows, self.target.squared)

    def keep(self, modules: Iterable[str] = (), blocks: Iterable[int] = (), sites: Iterable[str] = ()) -> Plan:
        """The plan that keeps all of these, with its predicted mismatch and its price.

        ``modules`` are paths, ``blocks`` numbers from 0, ``sites`` some of ``KEEPABLE_SITES``. Raises ValueError for
        those that the model does not have.
        """
        return self.priced(self.unpriced(modules, blocks, sites))

    def plan(self, budget: float, unit: str = "blocks", beside: Plan | None = None) -> Plan:
        """The plan with the least predicted squared error that keeps ``budget`` units.

        ``unit`` is one of

        - "blocks", "modules" (the smallest ones with parameters), or "sites", which overlap: at most ``budget``.
        - "bytes" of parameters and of the residual stream of one window: modules, "residual" and "scores" that fit
          together. Scores take no bytes.

        The plan also keeps what the plan ``beside`` keeps, and the budget pays for that first (``size``).

        Raises ValueError for another unit, for a budget that is no whole number or negative, for one that exceeds the
        number of units, and for one below the size of ``beside``.
        """
        if unit not in UNITS:
            raise ValueError(f"the unit of a budget must be one of {', '.join(UNITS)}, got {unit!r}")
        if not isinstance(budget, int | np.integer) or isinstance(budget, bool):
            raise ValueError(f"a budget must be a whole number, got {budget!r}")
        if unit == "bytes" and budget < 0:
            raise ValueError(f"a budget of bytes must be at least 0, got {budget}")
        count = budget if unit == "bytes" else len(getattr(self.structure, unit))
        if not 0 <= budget <= count:
            raise ValueError(f"the budget must be between 0 and the {count} {unit} of the model, got {budget}")
        first = [] if beside is None else [beside]
        needed = [self.size(each, unit) for each in first]
        if sum(needed) > budget:
            raise ValueError(f"the budget must pay for {first[0].label}, {needed[0]} {unit}, got {budget}: raise it")
        names = self._names(unit)
        units = first + [self.unpriced(**{kind: [name]}) for kind, name in names]
        if unit == "bytes":
            knapsack, most = self._by_bytes(units), 8 * budget
        else:
            knapsack, most = self.knapsack(units, [*needed, *[1.0] * len(names)]), budget
        taken = np.flatnonzero(replace(knapsack, alternatives=[[0]] * len(first)).least_error(most)[: len(units)])
        if first:
            chosen = [units[i] for i in taken]
            return self.priced(replace(self.together(chosen), label=", ".join(each.label for each in chosen)))
        kept: dict[str, Any] = defaultdict(list)
        for kind, name in (names[i] for i in taken):
            kept[kind].append(name)
        return self.keep(**kept)

    def size(self, plan: Plan, unit: str) -> int:
        """The part of a budget of ``unit`` that ``plan`` takes: its bytes, or 1 for each part of any kind."""
        if unit == "bytes":
            return self.priced(plan).parameter_bytes + self.stream_bytes * self.length * plan.residual
        return len(plan.modules) + plan.residual + plan.scores

    def together(self, units: Sequence[Plan]) -> Plan:
        """The plan that keeps what any of ``units`` keeps."""
        sites = [site for site in ("residual", "scores") if any(getattr(unit, site) for unit in units)]
        return self.unpriced([path for unit in units for path in unit.modules], sites=sites)

    def knapsack(
        self, units: Sequence[Plan], sizes: Sequence[float], errors: Sequence[float] = (), shared=(), saved=()
    ) -> Knapsack:  # fmt: skip
        """The knapsack whose decisions are ``units`` to keep; the other arguments are those of ``Knapsack``.

        Some modules, such as embeddings, gain more beside an fp32 stream: a decision that needs both and costs nothing.
        """
        stream = next((i for i, unit in enumerate(units) if unit.residual), None)
        embedding = (any(within(e, path) for e in self._embeddings for path in unit.modules) for unit in units)
        pairs = [(i, stream) for i, gains in enumerate(embedding) if gains and stream not in (None, i)]
        plans = [*units, *(self.together([units[i] for i in pair]) for pair in pairs)]
        needs = [(len(units) + n, i) for n, pair in enumerate(pairs) for i in pair]
        covers = np.reshape([self.vanishing(plan) for plan in plans], (len(plans), len(self.relative)))
        free = np.zeros(len(pairs))
        errors = errors or [0.0] * len(units)
        return Knapsack(
            np.append(errors, free), np.append(sizes, free), self.relative, covers, shared, saved, needs=needs
        )

    def _by_bytes(self, units: Sequence[Plan]) -> Knapsack:
        """The knapsack of ``units`` whose sizes are the bits that they add."""
        stream = 8.0 * self.stream_bytes * self.length
        kept = [self.stored_in_fp32(unit) for unit in units]
        shared, saved = structure.storage(self._parameters, kept)
        return self.knapsack(units, [unit.residual * stream for unit in units], shared=shared, saved=saved)

    @cached_property
    def _parameters(self) -> list[structure.Stored]:
        """All parameters as the recipe of the prediction stores them."""
        return structure.stored_parameters(self.model, self.recipe)

    def stored_in_fp32(self, plan: Plan) -> list[str]:
        """Paths of the modules with parameters in fp32: the kept ones, and norms of the stream if that is kept."""
        return [*plan.modules, *(self.structure.stream_norms if plan.residual else [])]

    def gains(self, unit: str) -> pd.DataFrame:
        """One row per block, site or module: its ``label``, and its ``gain`` if it alone is kept.

        A gain is the share of the predicted squared error that vanishes. Gains add up over units that do not overlap.
        Raises ValueError for another unit.
        """
        if unit not in UNITS[:-1]:
            raise ValueError(f"gains must be by one of {', '.join(UNITS[:-1])}, got {unit!r}")
        total = self.relative.sum() or 1.0
        plans = [self.unpriced(**{kind: [name]}) for kind, name in self._names(unit)]
        gains = [self.relative[self.vanishing(plan)].sum() / total for plan in plans]
        return pd.DataFrame({"label": [plan.label for plan in plans], "gain": gains})

    def remaining(self, plan: Plan) -> float:
        """The predicted squared relative error under ``plan``, mean over windows."""
        return float(self.relative[~self.vanishing(plan)].sum())

    def _names(self, unit: str) -> list[tuple[str, Any]]:
        """An argument of ``unpriced``, and the name to give it, for everything that a budget of ``unit`` may keep."""
        found = self.structure
        if unit != "bytes":
            return [(unit, name) for name in (range(len(found.blocks)) if unit == "blocks" else getattr(found, unit))]
        known = {*found.modules, *self._embeddings, *self._heads, *found.blocks}.union(*found.sites.values())
        streams = [("sites", site) for site in ("residual", "scores") if site in found.sites]
        return streams + [("modules", path) for path, _ in self.model.named_modules() if path in known]

    @property
    def stream_bytes(self) -> int:
        """Extra bytes of an fp32 residual stream, per token."""
        width = getattr(text_config(self.model), "hidden_size", 0) or 0
        return int((structure.FP32_BITS - self.recipe.kernels.bits) // 8) * width

    def _require_sites(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        sites = self.structure.sites
        if wrong := ", ".join(name for name in names if name not in sites):
            raise ValueError(f"sites to keep must be among those of this model, {', '.join(sites)}, got {wrong}")
        return sites

    def unpriced(self, modules: Iterable[str] = (), blocks: Iterable[int] = (), sites: Iterable[str] = ()) -> Plan:
        """The plan of ``keep`` without price and prediction."""
        named, sites = ((x,) if isinstance(x, str) else tuple(dict.fromkeys(x)) for x in (modules, sites))
        modules, blocks, paths = outermost(named), tuple(dict.fromkeys(blocks)), self.structure.blocks
        if wrong := [n for n in blocks if not 0 <= n < len(paths)]:
            raise ValueError(f"blocks must be between 0 and {len(paths) - 1}, got {wrong}")
        inside = self._require_sites(sites)
        words = [f"{len(modules)} modules"] if len(modules) > 4 else [*modules]
        numbered = [f"block{'s' * (len(blocks) != 1)} {', '.join(map(str, blocks))}"] * bool(blocks)
        kept = outermost([*modules, *(paths[n] for n in blocks), *(path for site in sites for path in inside[site])])
        return Plan(
            self.recipe.name, kept, "residual" in sites, "scores" in sites,
            ", ".join([*words, *numbered, *sites]) or "nothing", weights_only=not self.kernels_round,
        )  # fmt: skip

    def priced(self, plan: Plan, known: bool = True) -> Plan:
        """``plan`` with its price, and its prediction if it is ``known`` from this recipe alone."""
        parameters = self._parameters if known else structure.stored_parameters(self.model, plan.recipe)
        low = self.kernels_round and (self.recipe.kernels.name != "fp32" or self.recipe.linear.inputs is not None)
        return replace(
            plan,
            predicted=float(self.predict(plan).predicted.mean()) if known else None,
            parameter_bytes=structure.parameter_bytes(parameters, self.stored_in_fp32(plan)),
            activation_bytes=plan.residual * self.stream_bytes,
            flops=structure.flops(self.structure, plan.modules, plan.scores, self.length) if low else 0,
        )
