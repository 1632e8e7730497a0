"""The record of the passes: where values are rounded, by how much, and what it contributes to the final error."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fragility_adjoint.internals import base_of, beyond_vmap
from fragility_core.models.paths import within
from fragility_numerics.nested import together

LARGE = 2**20  # entries of a weight from which on its errors are formed in pieces
ALIKE = {"operand", "key cache", "value cache"}  # places where a channel may be rounded alike at every position
ErrorWeighting = Callable[..., Iterable[Tensor]]  # error times gradient (P, ...), in pieces


class Place(NamedTuple):
    """A place where values are rounded: the result of a kernel, or a parameter."""

    module: str  # path of the module whose forward runs the kernel, or that owns the parameter
    name: str  # of the torch function, or of the parameter
    occurrence: int  # how many kernels of that name ran before in the same module and pass
    kind: str  # "kernel" or "weight"
    product: str = ""  # what a matrix product multiplies values by: "weights" or "values"
    stream: bool = False  # whether the kernel is a sum with the residual stream, in the forward of a block itself


class LookedUp(NamedTuple):
    """The gradient (P, U, d) of those ``rows`` (U,) of a table, in rising order, that a pass has looked up."""

    rows: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, indices: Tensor, gradient: Tensor) -> "LookedUp":
        """Sum a ``gradient`` (P, N, d) for every lookup by ``indices`` (N,)."""
        rows, number = indices.unique(return_inverse=True)
        total = gradient.new_zeros(len(gradient), len(rows), gradient.shape[-1])
        return cls(rows, total.index_add_(1, number, gradient))

    def between(self, first: int, end: int) -> range:
        """The places here of the rows from ``first`` up to ``end``."""
        return range(*torch.searchsorted(self.rows, self.rows.new_tensor([first, end])).tolist())


@dataclass
class PassPosition:
    """The position of a differentiated pass over the window with this number."""

    window: int = 0
    path: list[str] = field(default_factory=lambda: [""])  # of the modules whose forward is running, outermost first
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # of kernels that ran, by module and name
    latest: tuple[int, str] | None = None  # the latest kernel's place, and the module in which it ran
    leaves: list[Tensor] = field(default_factory=list)  # without a history, made in the pass
    again: bool = False  # whether a module runs for the second time


class ErrorRecorder:
    """Records ||gradient * error|| and <gradient, error> for every window, probe and place.

    Records stay on the device until ``contributions`` is called. Places are numbered as they are first seen.
    """

    def __init__(self, alike: bool = True):
        self.alike = alike  # errors of a channel in ALIKE; those of stochastic rounding are not
        self.places: dict[Place, int] = {}
        self.numbered: list[Place] = []  # the same, in order
        self.ran: set[str] = set()  # paths of the modules that ran
        self.roles: dict[str, set[str]] = {"attention": set(), "router": set()}  # paths of modules
        self.ends: dict[int, str] = {}  # for the last place in a module's call: path of the outermost such module
        self.shares = {"kernel": 1.0, "weight": 1.0}  # of a record that count, by the kind of its place
        # By window, first probe and place: norms and sums (P,) of P probes.
        self._records: list[tuple[int, int, int, Tensor, Tensor]] = []
        self._extremes: list[tuple[int, int, Tensor]] = []  # by window and place, (2,)
        self._gathered: list[tuple[np.ndarray, Tensor]] = []  # (N, 3) windows, probes, places; norms and sums (2, N)
        self._infinite: list[tuple[list[tuple[int, int]], Tensor]] = []  # N windows and places; largest, lowest (2, N)
        self._looked_up: dict[int, list[tuple[Any, Tensor]]] = {}  # by the ``id`` of leaves that are kept
        self._readers: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}  # see ``watch_reader``
        self.probe = 0  # the first one of the running backward pass
        self.observer: Callable[[int, Tensor], object] | None = None  # is shown each place's errors times gradients
        self.now = PassPosition()

    def mark(self) -> tuple[int, int]:
        """The point at which the records of the next pass begin, for ``rewind``."""
        return len(self._records), len(self._extremes)

    def rewind(self, mark: tuple[int, int] | None = None) -> None:
        """Drop the records since ``mark``, or all: those of a pass that has failed."""
        records, extremes = mark or (0, 0)
        del self._records[records:], self._extremes[extremes:]
        if mark is None:
            self._gathered, self._infinite = [], []
        for rows in (*self._looked_up.values(), *self._readers.values()):
            rows.clear()

    def begin(self, window: int = 0) -> None:
        """Start a pass of the window with this number."""
        self.now = PassPosition(window)

    @property
    def path(self) -> list[str]:
        """Paths of the modules whose forward is running, outermost first."""
        return self.now.path

    def enter(self, path: str) -> None:
        """Begin the forward of the module at ``path``."""
        self.path.append(path)
        self.ran.add(path)

    def leave(self) -> None:
        """End the forward of the running module."""
        path, latest = self.path.pop(), self.now.latest
        if latest is not None and within(latest[1], path) and not self.now.again:
            self.ends[latest[0]] = path

    def bookmark(self, path: str) -> PassPosition:
        """The position of the pass before the forward of the module at ``path``; for ``replaying`` it."""
        counts = {(module, name): n for (module, name), n in self.now.counts.items() if within(module, path)}
        return PassPosition(self.now.window, list(self.path), Counter(counts), again=True)

    @contextmanager
    def setting_leaves_apart(self) -> Iterator[None]:
        """A context in which the leaves that are made are not those of the pass."""
        before, self.now.leaves = self.now.leaves, []
        try:
            yield
        finally:
            self.now.leaves = before

    @contextmanager
    def replaying(self, bookmark: PassPosition) -> Iterator[list[Tensor]]:
        """A context in which a module runs again: kernels have the places that they had. Yields the new leaves."""
        before, seen = self.now, len(self._extremes)
        self.now = copy.deepcopy(bookmark)
        try:
            yield self.now.leaves
        finally:
            self.now = before
            del self._extremes[seen:]

    def mark_module(self, role: str) -> None:
        """Note that the running module multiplies values by values ("attention") or chooses experts ("router")."""
        self.roles[role].add(self.path[-1])

    def kernel(self, name: str, product: str = "", stream: bool = False) -> int:
        """The place of the kernel that is running."""
        module = self.path[-1]
        self.now.counts[module, name] += 1
        number = self._number(Place(module, name, self.now.counts[module, name] - 1, "kernel", product, stream))
        self.now.latest = number, module
        return number

    def weight(self, path: str) -> int:
        """The place of the parameter or buffer at ``path``."""
        module, _, name = path.rpartition(".")
        return self._number(Place(module, name, 0, "weight"))

    def _number(self, place: Place) -> int:
        if place not in self.places:
            self.places[place] = len(self.places)
            self.numbered.append(place)
        return self.places[place]

    def watch(self, place: int, result: Tensor, error: Tensor) -> None:
        """Record ``error`` times gradient whenever a backward pass reaches the kernel's ``result``."""
        record = self.bound_record()
        result.register_hook(partial(beyond_vmap, lambda gradient: record(place, error * gradient)))

    def watch_reader(self, place: int, view: Tensor, first: int, error: Tensor) -> None:
        """Watch the kernel at ``place``, which reads by a ``view`` what was rounded at the place ``first``, too."""
        known = self._readers.setdefault((self.now.window, first), [])
        view.register_hook(partial(beyond_vmap, lambda gradient: known.append((place, error * gradient))))

    def watch_view(self, place: int, view: Tensor, error: Tensor) -> None:
        """Watch a kernel that wrote to a ``view``: autograd gives gradients to the whole tensor."""
        whole = base_of(view)
        errors = torch.empty_strided(whole.shape, whole.stride(), dtype=error.dtype, device=error.device).zero_()
        first = view.storage_offset() - whole.storage_offset()
        errors.as_strided(view.shape, view.stride(), first).copy_(error)
        self.watch(place, whole, errors)

    def watch_leaf(self, place: int, leaf: Tensor, weighted: ErrorWeighting, kept: bool = False) -> None:
        """Watch a tensor without a history, such as a weight, as ``watch`` does; its gradient is not kept.

        ``weighted`` gives the error times gradient (P, ...) in pieces, which are recorded one after the other. A leaf
        that is ``kept`` is used by the passes of all windows, one after the other; its ``weighted`` also takes the
        gradient of rows that were looked up.
        """
        rows: list[tuple[Tensor, Tensor]] = []
        window = None if kept else self.now.window
        if kept:
            self._looked_up[id(leaf)] = rows

        def record(gradient: Tensor | None) -> None:
            if rows:
                indices, gradients = zip(*rows)
                rows.clear()
                looked_up = LookedUp.of(torch.cat(indices), torch.cat(gradients, 1))
                self.record(place, weighted(gradient, looked_up), window=window)
            elif gradient is not None:
                self.record(place, weighted(gradient), window=window)

        self.hook_leaf(leaf, record)

    def takes_rows(self, table: Tensor) -> bool:
        """True if ``look_up`` takes the gradient of rows of the large ``table`` in place of that of the whole."""
        return table.numel() > LARGE and table.ndim == 2 and id(table) in self._looked_up

    def look_up(self, leaf: Tensor, indices: Tensor, gradient: Tensor) -> None:
        """Take the ``gradient`` (P, N, d) of the rows ``indices`` (N,) of a ``leaf`` that is kept."""
        self._looked_up[id(leaf)].append((indices, gradient))

    def hook_leaf(self, leaf: Tensor, function: Callable[[Tensor], None]) -> None:
        """Call ``function`` with the gradient (P, ...) of ``leaf`` in every backward pass; the leaf itself gets zeros.

        The gradient is None where only rows of the leaf were looked up.
        """

        def hook(gradient: Tensor | None) -> Tensor | None:
            beyond_vmap(function, gradient)
            return None if gradient is None else gradient.new_zeros(()).expand(gradient.shape)

        leaf.register_hook(hook)

    def bound_record(self) -> Callable[..., None]:
        """``record`` for the window of the running pass, for use in a backward pass of several windows."""
        return partial(self.record, window=self.now.window)

    def record(
        self, place: int, weighted_error: Tensor | Iterable[Tensor], first: int = 0, window: int | None = None
    ) -> None:  # fmt: skip
        """Record norm and sum of error times gradient (P, ...) of P probes at ``place``; those of one place add up.

        The product may come in pieces. Probes are numbered from ``first`` on; ``window`` is the running one by default.

        Inputs of linear layers, keys and values in a cache often have a channel that is large, and so rounded alike, at
        every position. There the products are first summed over positions, the last dimension but one.
        """
        window = self.now.window if window is None else window
        readers, share = self._readers.get((window, place), []), self.shares[self.numbered[place].kind]
        if share:
            pieces = [weighted_error] if isinstance(weighted_error, Tensor) else weighted_error
            for each, norm, total in self._by_reader(place, pieces, readers):
                counted = (norm, total) if share == 1 else (norm * share**0.5, total * share)
                self._records.append((window, self.probe + first, each, *counted))
        readers.clear()

    def _by_reader(self, place: int, pieces: Iterable[Tensor], readers: list[tuple[int, Tensor]]) -> list[tuple]:
        """Places, norms and sums (P,) of the kernels that read what was rounded at ``place``, and by ``readers``.

        ``pieces`` are of all kernels together. Each kernel has the share of their square that its own has in the sum.
        """
        if not readers:
            return [(place, *self._norms_and_sums(place, pieces))]
        (whole,) = pieces = [*pieces]
        own = [(place, whole - sum(x for _, x in readers)), *readers]
        found = [(each, *self._norms_and_sums(each, [x])) for each, x in own]
        factor, *_ = self._norms_and_sums(place, pieces, shown=False)
        factor /= torch.linalg.vector_norm(torch.stack([norm for _, norm, _ in found]), dim=0)
        return [(each, norm * factor.nan_to_num(0.0), total) for each, norm, total in found]

    def _norms_and_sums(self, place: int, pieces: Iterable[Tensor], shown: bool = True) -> tuple[Tensor, Any]:
        """Norms and sums (P,) of an error times gradient (P, ...) in ``pieces``, which the observer is ``shown``."""
        norms, sums = [], []
        for piece in pieces:
            if self.observer is not None and shown:
                self.observer(place, piece)
            alike = self.alike and self.numbered[place].name in ALIKE and piece.ndim > 2  # see ``record``
            own = (piece.sum(-2) if alike else piece)[:, None].flatten(1)
            norms.append(torch.linalg.vector_norm(own, dim=1))
            sums.append(own.sum(1))
        if len(norms) == 1:
            return norms[0], sums[0]
        return torch.linalg.vector_norm(torch.stack(norms), dim=0), sum(sums)

    def record_extremes(self, place: int, stored: Tensor) -> None:
        """Record the largest and the lowest number ``stored`` at ``place``: infinite after an overflow."""
        if stored.numel():
            lowest, largest = stored.aminmax()
            self._extremes.append((self.now.window, place, torch.stack([largest, -lowest])))

    def overflows(self) -> tuple[dict[int, int], dict[int, int]]:
        """For every window that stored +inf since the last call, the first place that did; and the same for -inf."""
        self.gather()
        gathered, self._infinite = self._infinite, []
        where = [each for places, _ in gathered for each in places]
        flags = torch.cat(together(x for _, x in gathered), 1).cpu().tolist() if where else [[], []]  # one transfer
        above, below = (
            dict(each for each, overflowed in reversed([*zip(where, found)]) if overflowed) for found in flags
        )
        return above, below

    def contributions(self, windows: int, probes: int) -> np.ndarray:
        """c^2, and then <gradient, error>, (2, windows, probes, places) from the records since the last call."""
        self.gather()
        gathered, self._gathered = self._gathered, []
        total = np.zeros((2, windows, probes, len(self.places)))
        if gathered:
            where, found = zip(*gathered)
            norms, sums = torch.cat(together(found), 1).cpu().double().numpy()  # one transfer from the device
            for whole, values in zip(total, (norms**2, sums)):
                np.add.at(whole, tuple(np.concatenate(where).T), values)
        return total

    def gather(self) -> None:
        """Join the records so far: thousands of small tensors would leave the heap full of holes, window by window."""
        records, self._records = self._records, []
        if records:
            where = [(window, first + p, place) for window, first, place, x, _ in records for p in range(len(x))]
            found = torch.stack([torch.cat(together(x)) for x in [*zip(*records)][-2:]])
            self._gathered.append((np.array(where), found))
        extremes, self._extremes = self._extremes, []
        if extremes:
            infinite = torch.stack(together(x for *_, x in extremes), 1).isposinf()
            self._infinite.append(([(window, place) for window, place, _ in extremes], infinite))
