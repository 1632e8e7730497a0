"""The record of a pass: where values are rounded, and what the backward passes say about each place."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fragility_core.models.tree import within


class Place(NamedTuple):
    """Where values are rounded: a kernel in the forward of a module, or a parameter that it owns."""

    module: str  # its path
    name: str  # of the torch function, or of the parameter
    occurrence: int  # how many kernels of that name ran before, in that module and pass
    kind: str  # "kernel" or "weight"
    product: str = ""  # what a matrix product multiplies values by: "weights" or "values"
    stream: bool = False  # whether it is a sum with the residual stream, in the forward of a block itself


class Tape:
    """Readings ||gradient * error|| of every window, probe and place, on the device until ``contributions``."""

    def __init__(self):
        self.places: dict[Place, int] = {}  # over all passes, in the order in which they were first seen
        self.ran: set[str] = set()  # paths of modules
        self.roles: dict[str, set[str]] = {"attention": set(), "router": set()}  # paths of modules, see ``note``
        self.ends: dict[int, str] = {}  # by the last kernel of a call of a module: the outermost that ended with it
        self._readings: list[tuple[int, int, int, Tensor]] = []
        self._largest: list[tuple[int, int, Tensor]] = []

    def clear(self) -> None:
        """Forget the readings of a call that did not end."""
        self._readings, self._largest = [], []

    def begin(self, window: int) -> None:
        """Start the passes of a window."""
        self.path = [""]  # of the modules whose forward is running, outermost first
        self.window, self.probe = window, 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._latest: tuple[int, str] | None = None  # kernel, and the module in which it ran

    def enter(self, path: str) -> None:
        """A module's forward begins."""
        self.path.append(path)
        self.ran.add(path)

    def leave(self) -> None:
        """A module's forward has ended."""
        path = self.path.pop()
        if self._latest is not None and within(self._latest[1], path):
            self.ends[self._latest[0]] = path

    def note(self, role: str) -> None:
        """The running module multiplies values by values ("attention") or chooses among experts ("router")."""
        self.roles[role].add(self.path[-1])

    def kernel(self, name: str, product: str = "", stream: bool = False) -> int:
        """The place of the kernel that is running."""
        module = self.path[-1]
        self._counts[module, name] += 1
        place = self._index(Place(module, name, self._counts[module, name] - 1, "kernel", product, stream))
        self._latest = place, module
        return place

    def weight(self, path: str) -> int:
        """The place of the parameter at ``path``."""
        module, _, name = path.rpartition(".")
        return self._index(Place(module, name, 0, "weight"))

    def _index(self, place: Place) -> int:
        return self.places.setdefault(place, len(self.places))

    def watch(self, place: int, result: Tensor, error: Tensor) -> None:
        """Read the gradient of a kernel's ``result`` with its ``error`` whenever a probe comes by."""
        result.register_hook(lambda gradient: self.read(place, error * gradient))

    def watch_part(self, place: int, view: Tensor, error: Tensor) -> None:
        """As ``watch``, for what a kernel wrote to a ``view``: gradients come to the whole that it is a part of."""
        whole = view._base
        errors = torch.empty_strided(whole.shape, whole.stride(), dtype=error.dtype, device=error.device).zero_()
        first = view.storage_offset() - whole.storage_offset()
        errors.as_strided(view.shape, view.stride(), first).copy_(error)
        self.watch(place, whole, errors)

    def watch_leaf(self, place: int, leaf: Tensor, error: Callable[[], Tensor]) -> None:
        """As ``watch``, for a tensor that no kernel made; its gradient is not kept."""

        def read(leaf: Tensor) -> None:
            self.read(place, leaf.grad.mul_(error()))
            leaf.grad = None

        leaf.register_post_accumulate_grad_hook(read)

    def read(self, place: int, weighted_error: Tensor) -> None:
        """Note the product of error and gradient at (a part of) ``place``."""
        self._readings.append((self.window, self.probe, place, torch.linalg.vector_norm(weighted_error)))

    def note_largest(self, place: int, stored: Tensor) -> None:
        """Note the largest of the values ``stored`` at ``place``: infinity where they overflowed."""
        if stored.numel():
            self._largest.append((self.window, place, stored.amax()))

    def overflows(self) -> dict[int, int]:
        """The first place that stored +inf, by window, since the last call; one transfer from the device."""
        noted, self._largest = self._largest, []
        largest = torch.stack([x for *_, x in noted]).cpu() if noted else ()
        return {window: place for (window, place, _), x in reversed([*zip(noted, largest)]) if torch.isposinf(x)}

    def contributions(self, windows: int, probes: int) -> np.ndarray:
        """c^2 (windows, probes, places) of all that was read since the last call; one transfer from the device."""
        readings, self._readings = self._readings, []
        total = np.zeros((windows, probes, len(self.places)))
        if readings:
            *where, norms = zip(*readings)
            np.add.at(total, tuple(map(list, where)), torch.stack(norms).cpu().double().numpy() ** 2)
        return total
