"""From one prediction to the best plan for any budget."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
from torch import Tensor, nn

from fragility_core import adjoint
from fragility_core.arithmetic.formats import get_format
from fragility_core.arithmetic.lowering import lower
from fragility_core.models.tree import embedding_paths, head_paths, is_norm, outermost, within
from fragility_core.protection import cost
from fragility_core.protection.baselines import top
from fragility_core.protection.keep import require_modules
from fragility_core.protection.plans import KEEPABLE_SITES, Plan
from fragility_core.protection.structure import Structure

UNITS = ("blocks", "sites", "modules", "bytes")
NEARLY_EXACT = 1 / 8  # of the error before it: roundings of like numbers differ by less, up to the ulp's factor of 2
PLACE_COLUMNS = ["kernel", "name", "kind", "site", "layer", "module", "stream", "ends", "block_output"]


class Contributions:
    """What every unit of a model that can be kept in fp32 contributes to the predicted mismatch.

    A prediction answers all questions: no pass is run for a plan, nor for another budget.
    """

    def __init__(self, model: nn.Module, prediction: adjoint.Prediction):
        """``prediction`` is that of ``model`` in low precision, ``model`` itself in fp32.

        ``model`` is asked for its modules and parameters' shapes, and runs over a few tokens. Raises ValueError
        where the prediction is finite for no window; other windows are left out.
        """
        self.model, self.format, self.length = model, get_format(prediction.format), prediction.length
        finite = prediction.windows[np.isfinite(prediction.windows.predicted)]
        if finite.empty:
            places = ", ".join(sorted(set(prediction.windows.overflow)))
            raise ValueError(
                f"a plan needs a prediction that is finite for some window, but in {self.format.name} all overflow "
                f"first in {places}: choose a format of wider range, such as bf16"
            )
        self.windows = finite.reset_index(drop=True)
        self.kernels = prediction.kernels[prediction.kernels.window.isin(finite.window)]
        places = self.kernels[PLACE_COLUMNS].drop_duplicates("kernel").sort_values("kernel")
        self.structure = Structure(model, places.reset_index(drop=True), prediction.ran)
        squares = self.kernels.c2 / self.kernels.window.map(finite.set_index("window").final_norm ** 2)
        samples = len(finite) * (self.kernels.probe.max() + 1)
        # Mean over windows and probes of c^2 / ||X_L||^2, by place: the squared relative error.
        self.relative = (squares.groupby(self.kernels.kernel).sum() / samples).to_numpy()
        self._modules = self.structure.places.module
        self._embeddings, self._heads = set(embedding_paths(model)), set(head_paths(model))
        self._kernels_round = bool(self.structure.places.kind.eq("kernel").any())  # not where weights only are rounded

    # --- Which roundings vanish ------------------------------------------------------------------

    def vanishing(self, plan: Plan) -> np.ndarray:
        """True for the places (in the order of ``structure.places``) that round no longer under ``plan``."""
        places, gone = self.structure.places, np.zeros(len(self.structure.places), dtype=bool)
        for path in plan.modules:
            inside = self._inside(path)
            kernels = np.flatnonzero(inside & places.kind.eq("kernel").to_numpy())
            wide = path in self._heads or (plan.residual and path in self._embeddings)  # its results stay fp32
            narrowed = self._kernels_round and not wide
            if narrowed and not len(kernels):  # a lookup: what is cast back is the rounded weights again
                continue
            gone |= inside
            if narrowed:
                gone[self._cast_back(path, kernels)] = False
        if plan.residual:
            gone |= self.structure.stream_sums.to_numpy()
            for path in self.structure.stream_norms:
                kernels = np.flatnonzero(self._inside(path) & places.kind.eq("kernel").to_numpy())
                gone[kernels] = True
                gone[self._cast_back(path, kernels)] = False
        if plan.scores:
            gone |= places.site.eq("scores").to_numpy()
        return gone

    def _cast_back(self, path: str, kernels: np.ndarray) -> list[int]:
        """Which places of the module at ``path`` stand for casting its results back: of each call the last kernel.

        Where that is exact what was rounded before it: in a norm that rounds and then scales by gamma = 1, and in an
        embedding that scales what it looks up by a power of two.
        """
        ended, norm = self.structure.places.ends, is_norm(self.model.get_submodule(path))
        standing = []
        for position, last in enumerate(kernels):
            if not (ended[last] and within(path, ended[last])):
                continue
            before = last
            if norm:
                before = kernels[max(position - 1, 0)]
            elif path in self._embeddings:
                before = np.flatnonzero(self._modules == path)[0]  # its weights
            exact = self.relative[last] < NEARLY_EXACT * self.relative[before]
            standing.append(int(before if exact else last))
        return standing

    def _inside(self, path: str) -> np.ndarray:
        return (self._modules.eq(path) | self._modules.str.startswith(f"{path}.")).to_numpy(dtype=bool)

    def predict(self, plan: Plan) -> pd.DataFrame:
        """``predicted`` mismatch and its ``standard_error`` of every window under ``plan``."""
        numbers = self.structure.places.kernel[~self.vanishing(plan)]
        return adjoint.predict(self.kernels[self.kernels.kernel.isin(numbers)], self.windows)

    # --- Plans -----------------------------------------------------------------------------------

    def keep(self, modules: Iterable[str] = (), residual: bool = False, scores: bool = False, label: str = "") -> Plan:
        """The plan that keeps this, with what it buys and costs; raises ValueError for a module there is not."""
        modules = outermost((modules,) if isinstance(modules, str) else tuple(modules))
        require_modules(self.model, modules)
        self._require_sites(["residual"] * residual + ["scores"] * scores)
        return self._priced(self._plan(modules, residual, scores, label))

    def of_blocks(self, numbers: Iterable[int]) -> Plan:
        """The plan that keeps the blocks of these ``numbers``, from 0; raises ValueError for one there is not."""
        return self._priced(self._of_blocks(tuple(dict.fromkeys(numbers))))

    def of_sites(self, names: Iterable[str]) -> Plan:
        """The plan that keeps these kinds of site (``KEEPABLE_SITES``); raises ValueError for one there is not."""
        return self._priced(self._of_sites(tuple(dict.fromkeys(names))))

    def of_modules(self, paths: Iterable[str]) -> Plan:
        """The plan that keeps these modules."""
        return self.keep(paths)

    def plan(self, budget: int, unit: str = "blocks") -> Plan:
        """The plan with the least predicted squared error that keeps ``budget`` units.

        ``unit`` is one of

        - "blocks" or "modules" (the smallest ones with parameters): additive, so sorting finds the best;
        - "sites": kinds of site overlap, so all choices of them are compared;
        - "bytes", of parameters and of the residual stream of one window: modules, "residual" and "scores" that
          take off the most error per byte, while they fit, or the best blocks or kinds of site that fit, if
          those take off more.

        Raises ValueError for another unit, or a budget that is negative or exceeds the number of units.
        """
        if unit not in UNITS:
            raise ValueError(f"a budget counts one of {', '.join(UNITS)}, got {unit!r}")
        if not isinstance(budget, int):
            raise ValueError(f"a budget must be a whole number, got {budget!r}")
        if unit == "bytes":
            if budget < 0:
                raise ValueError(f"a budget of bytes must be at least 0, got {budget}")
            fitting = [plan for plan in self._few_units() if self._bytes(plan) <= budget]
            return self._priced(min([self._for_bytes(budget), *fitting], key=self.remaining))
        count = len(getattr(self.structure, unit))
        if not 0 <= budget <= count:
            raise ValueError(f"the budget must be between 0 and the {count} {unit} of the model, got {budget}")
        if unit == "sites":
            choices = combinations([site for site in KEEPABLE_SITES if site in self.structure.sites], budget)
            return self._priced(min(map(self._of_sites, choices), key=self.remaining))
        gains = self.gains(unit).gain
        best = top(gains, budget)
        if unit == "blocks":
            return self.of_blocks(best)
        return self.of_modules(self.structure.modules[i] for i in best)

    def gains(self, unit: str) -> pd.DataFrame:
        """One row per block, site or module: its ``label``, and the ``gain``, what keeping it alone takes off.

        Gains are shares of the predicted squared error, and add up over units that do not overlap.
        """
        total = self.relative.sum()
        plans = self._alone(unit)
        gains = [self.relative[self.vanishing(plan)].sum() / total for plan in plans]
        return pd.DataFrame({"label": [plan.label for plan in plans], "gain": gains})

    def remaining(self, plan: Plan) -> float:
        """Predicted squared relative error under ``plan``, mean over windows."""
        return float(self.relative[~self.vanishing(plan)].sum())

    def _alone(self, unit: str) -> list[Plan]:
        if unit == "blocks":
            return [self._of_blocks((number,)) for number in range(len(self.structure.blocks))]
        if unit == "sites":
            return [self._of_sites((site,)) for site in KEEPABLE_SITES if site in self.structure.sites]
        return [self._plan((path,)) for path in self.structure.modules]

    def _for_bytes(self, budget: int) -> Plan:
        """Unit after unit, each time the one that takes off the most error a byte, of those that fit."""
        units = [
            self._plan((path,), path in self._embeddings and self._kernels_round)
            for path in (*self.structure.modules, *self._embeddings)
        ]
        units += [self._of_sites((site,)) for site in ("residual", "scores") if site in self.structure.sites]
        vanishing = np.stack([self.vanishing(unit) for unit in units])  # (units, places)
        streams = np.array([unit.residual for unit in units])
        parameters = np.array([self._parameter_bytes(unit) for unit in units])
        stream_bytes = self._activation_bytes(self._plan(residual=True)) * self.length
        chosen: list[int] = []
        while True:
            gone, stream = vanishing[chosen].any(0), streams[chosen].any()
            price = parameters + stream_bytes * (streams & ~stream)
            gain = (vanishing & ~gone) @ self.relative
            budget_holds = parameters[chosen].sum() + stream_bytes * stream + price <= budget
            worth = np.where(budget_holds & (gain > 0), gain / np.maximum(price, 1), 0)
            if not worth.any():
                break
            chosen.append(int(worth.argmax()))
        kept = [units[i] for i in sorted(chosen)]
        modules = [path for unit in kept for path in unit.modules]
        return self._plan(modules, any(u.residual for u in kept), any(u.scores for u in kept))

    def _few_units(self) -> Iterator[Plan]:
        """The best plans of all numbers of blocks, and all choices of kinds of site."""
        order = np.argsort(-self.gains("blocks").gain, kind="stable")
        yield from (self._of_blocks(tuple(sorted(order[:count].tolist()))) for count in range(len(order) + 1))
        sites = [site for site in KEEPABLE_SITES if site in self.structure.sites]
        yield from (self._of_sites(names) for count in range(len(sites) + 1) for names in combinations(sites, count))

    def _bytes(self, plan: Plan) -> int:
        return self._parameter_bytes(plan) + self._activation_bytes(plan) * self.length

    def _parameter_bytes(self, plan: Plan) -> int:
        widened = self.structure.stream_norms if plan.residual else []  # beside an fp32 stream
        return cost.parameter_bytes(self.model, [*plan.modules, *widened], self.format)

    def _activation_bytes(self, plan: Plan) -> int:
        return plan.residual * (cost.WIDE - self.format.storage.itemsize) * cost.stream_width(self.model)

    def _of_blocks(self, numbers: tuple[int, ...]) -> Plan:
        paths = self.structure.blocks
        if wrong := [n for n in numbers if not 0 <= n < len(paths)]:
            raise ValueError(f"blocks must be between 0 and {len(paths) - 1}, got {wrong}")
        label = f"block{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}" if numbers else ""
        return self._plan([paths[n] for n in numbers], label=label)

    def _of_sites(self, names: tuple[str, ...]) -> Plan:
        sites = self._require_sites(names)
        modules = outermost([path for name in names for path in sites[name]])
        return self._plan(modules, "residual" in names, "scores" in names, ", ".join(names))

    def _require_sites(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        sites = self.structure.sites
        if wrong := [name for name in names if name not in sites]:
            raise ValueError(
                f"sites to keep must be among those of this model, {', '.join(sites)}, got {', '.join(wrong)}"
            )
        return sites

    def _plan(
        self, modules: Collection[str] = (), residual: bool = False, scores: bool = False, label: str = ""
    ) -> Plan:
        words = [f"{len(modules)} modules"] if len(modules) > 4 else list(modules)
        words += ["residual"] * residual + ["scores"] * scores
        return Plan(
            self.format.name, tuple(modules), residual, scores, label or ", ".join(words) or "nothing",
            weights_only=not self._kernels_round,
        )  # fmt: skip

    def _priced(self, plan: Plan) -> Plan:
        return replace(
            plan,
            predicted=float(self.predict(plan).predicted.mean()),
            parameter_bytes=self._parameter_bytes(plan),
            activation_bytes=self._activation_bytes(plan),
            flops=cost.flops(self.structure, plan.modules, plan.scores, self.length) if self._kernels_round else 0,
        )


def plan(
    model: nn.Module,
    windows: Tensor,
    format: str,
    budget: int,
    unit: str = "blocks",
    probes: int = 1,
    execution: str = "auto",
) -> Plan:
    """The plan with the least predicted error that keeps ``budget`` units of the fp32 ``model`` in fp32.

    ``windows`` (B, T) are token ids on the model's device; see ``Contributions.plan`` for units and
    errors, ``Adjoint`` for ``probes``. For several budgets make the ``Contributions`` and ask them.
    """
    prediction = adjoint.Adjoint(lower(model, format, execution), model, probes)(windows)
    return Contributions(model, prediction).plan(budget, unit)
