"""Differentiated passes of offloaded models: one part after the other has its weights and its graph.

The forward pass runs each part as the whole pass does, and keeps only what entered it. The backward pass runs each part
again from there, and then back. Memory holds one part at a time; only what enters the parts grows with the depth.
Kernels run in the order of the whole pass, so that all numbers are the same.

Several windows share each read. Their forward passes run side by side (``fragility_offload.lockstep``). One backward
pass goes through all of them, part by part: a link from part n of every window to part n + 1 of all windows makes
autograd finish part n + 1 of every window before it comes to part n of any.
"""

import copy
import threading
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from fragility_adjoint.internals import copy_marks, entering, is_stream
from fragility_adjoint.predictor.arithmetic import LowArithmetic
from fragility_adjoint.predictor.parameters import ParameterTable, RoundedParameters, WeightedError
from fragility_adjoint.predictor.probes import backward, over_probes
from fragility_adjoint.predictor.recorder import ErrorRecorder
from fragility_numerics.internals import replace_forward, without_function_modes
from fragility_numerics.modes import current_function_mode
from fragility_numerics.nested import map_tensors, tensors
from fragility_offload.lockstep import LastRead, barrier
from fragility_offload.offloaded import parts, with_shared


class TensorUses:
    """Tensors that a streamed pass has used."""

    def __init__(self):
        self.entered = 0  # how many parts
        self.counts: Counter[str] = Counter()  # how often it has used a tensor
        # gradients of tensors that it uses several times, on the host, by path and first probe
        self.totals: dict[tuple[str, int], Tensor] = {}
        self.anchor = torch.zeros((), requires_grad=True)  # the backward pass goes to it, and so reaches all parts


class Stream:
    """The parts of an offloaded ``model`` in differentiated passes."""

    def __init__(self, model: nn.Module, rounded: RoundedParameters, recorder: ErrorRecorder):
        self.rounded, self.recorder = rounded, recorder
        self.owned: dict[str, list[str]] = {}  # paths of tensors by that of the part
        known = {id(x): path for path, x in rounded.tensors.items()}
        self.parts = parts(model)
        for path, module in self.parts.items():
            owned = [*module.parameters(), *module.buffers()]
            self.owned[path] = [known[id(x)] for x in owned if id(x) in known]
            loading: Any = module.forward  # a Loading
            replace_forward(module, partial(self.run, path, loading.forward))
        paths = {path for owned in self.owned.values() for path in owned}
        self.staying = [path for path in rounded.tensors if path not in paths]  # those that no part owns
        self.uses: dict[int, TensorUses] = {}  # by window
        # By the number of parts that a window has entered, and by window: the link that the latest part has given.
        self.links: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self.last = LastRead()
        self.at_once = True  # whether all probes share the backward pass of a part
        self.lock = threading.Lock()  # of a backward pass: autograd has a thread for each device

    def begin(self, point: LowArithmetic) -> tuple[LowArithmetic, Tensor]:
        """Start a pass of the recorder's window, in the arithmetic that is returned: at ``point``, with own leaves.

        A backward pass must go to the tensor that is returned, so that it reaches all parts.
        """
        window = self.recorder.now.window
        uses = self.uses[window] = TensorUses()
        self.links[0][window] = uses.anchor
        own = copy.copy(point)
        own.parameters = self.rounded.make_leaves(self.staying, point.exact, self.watch)
        return own, uses.anchor

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A context for a backward pass through all windows. Afterwards gradients that were added up are recorded."""
        for uses in self.uses.values():
            uses.totals.clear()  # a backward pass may have failed
        self.links.clear()
        yield
        self.last.close()
        for path in sorted({path for uses in self.uses.values() for path, _ in uses.totals}):
            place, tensor = self.recorder.weight(path), self.rounded.tensors[path]
            with self.rounded.read([path]):
                weighted = self.rounded.weighted_error(path, tensor.detach().float())
            for window, uses in self.uses.items():
                for probe in [probe for found, probe in uses.totals if found == path]:
                    total = uses.totals.pop((path, probe)).to(tensor.device)
                    self.recorder.record(place, weighted(total), probe - self.recorder.probe, window)

    def __enter__(self) -> None:
        """Begin passes, which are forgotten with what they have read at the end of the context."""

    def __exit__(self, *error) -> None:
        self.uses.clear()
        self.links.clear()
        self.last.close()

    def read(self, path: str) -> None:
        """Read the part at ``path``, unless it was read last."""
        with without_function_modes():
            self.last.ask(path, partial(self.rounded.read, self.owned[path]))

    def run(self, path: str, forward: Callable, *args, **kwargs) -> Any:
        """Run the part at ``path``, whose own forward is ``forward``."""
        now = self.recorder.now
        barrier()  # wait for the passes beside this one
        self.recorder.now = now
        with without_function_modes():
            args, kwargs = entering(self.parts[path], args, kwargs)
        self.read(path)
        uses = self.uses[now.window]
        uses.counts.update(self.owned[path])
        uses.entered += 1
        if shared := {name: x for name, x in kwargs.items() if isinstance(x, UserDict)}:  # keys and values of layers
            kwargs |= {name: dict(x) for name, x in shared.items()}
            forward = partial(with_shared, forward, shared)
        call = PartCall(self, path, forward, args, kwargs)
        with without_function_modes():
            inputs = [x for x in tensors((args, kwargs)) if x.requires_grad]
        result = call.result(inputs)
        for name, x in shared.items():
            x.update(result[1][name])
        return result[0] if shared else result

    def watch(self, path: str, place: int, leaf: Tensor, weighted: WeightedError) -> None:
        """Watch a leaf (``ErrorRecorder.watch_leaf``); gradients of one that is used often are added up first."""
        uses = self.uses[self.recorder.now.window]
        if uses.counts[path] > 1:
            self.recorder.hook_leaf(leaf, partial(self._add, uses.totals, path))
        else:
            self.recorder.watch_leaf(place, leaf, weighted)

    def _add(self, totals: dict[tuple[str, int], Tensor], path: str, gradient: Tensor) -> None:
        key, gradient = (path, self.recorder.probe), gradient.cpu()
        totals[key] = totals[key] + gradient if key in totals else gradient


class PartCall:
    """One call of a part: what entered it, from which it can be run again."""

    def __init__(self, stream: Stream, path: str, forward: Callable, args: tuple, kwargs: dict):
        self.stream, self.path, self.forward = stream, path, forward
        self.arithmetic = current_function_mode()
        self.bookmark = stream.recorder.bookmark(path)
        self.device = next(stream.parts[path].parameters()).device
        with without_function_modes():
            self.given = map_tensors((args, kwargs), self._keep)

    def _keep(self, x: Tensor) -> Tensor:
        """``x`` without its history. The residual stream is kept on the host, all else is shared by the parts."""
        return copy_marks(x, x.data.cpu() if is_stream(x) else x.data).requires_grad_(x.requires_grad)

    def inputs(self) -> tuple[tuple, dict, list[Tensor]]:
        """Arguments for the part's forward, and those tensors among them that have a gradient."""
        leaves = []

        def make(x: Tensor) -> Tensor:
            fresh = copy_marks(x, x.data.to(self.device))
            if x.requires_grad:
                leaves.append(fresh.requires_grad_())
            return fresh

        with without_function_modes():
            args, kwargs = map_tensors(self.given, make)
        return tuple(map(own_copy, args)), {name: own_copy(x) for name, x in kwargs.items()}, leaves

    def parameters(self) -> ParameterTable:
        """Leaves for the tensors that the part owns, read now."""
        stream = self.stream
        with without_function_modes():
            return stream.rounded.make_leaves(stream.owned[self.path], self.arithmetic.exact, stream.watch)

    def result(self, inputs: Sequence[Tensor]) -> Any:
        """The result of the part as one differentiable function of ``inputs``."""
        args, kwargs, _ = self.inputs()
        inside = self.arithmetic.with_parameters(self.parameters())
        with self.stream.recorder.setting_leaves_apart(), inside, torch.enable_grad():
            returned = self.forward(*args, **kwargs)
        with without_function_modes():
            found = list(tensors(returned))
            plain = [x.data for x in found]
            window, links = self.bookmark.window, self.stream.links
            entered = self.stream.uses[window].entered
            later = links[entered - 1]
            if any(x.requires_grad for x in found):
                constant = [p for x, p in zip(found, plain) if not x.requires_grad]
                links[entered][window], *plain = Part.apply(
                    self, constant, plain, len(inputs), *inputs, *later.values()
                )
            else:
                links[entered] = later | links[entered]
            results = iter([copy_marks(x, y) for x, y in zip(found, plain)])
            return map_tensors(returned, lambda _: next(results))

    def gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor] | list[None]:
        """The gradients (P, ...) of the inputs, from those of the results; records what the part contributes."""
        if all(gradient is None for gradient in gradients):
            return [None] * sum(x.requires_grad for x in tensors(self.given))
        with self.stream.lock:
            self.stream.read(self.path)
            args, kwargs, inputs = self.inputs()
            with self.stream.recorder.replaying(self.bookmark) as made, torch.enable_grad():
                parameters = self.parameters()
                with self.arithmetic.with_parameters(parameters), self.arithmetic:
                    returned = self.forward(*args, **kwargs)
                reached = [(x, g) for x, g in zip(tensors(returned), gradients) if g is not None]
                del returned
                probes = max(len(g) for _, g in reached)
                outputs, given = zip(*((x, g.expand(probes, *x.shape)) for x, g in reached))
                return self._back(outputs, [*made, *parameters.leaves], given, inputs)

    def _back(self, outputs: Sequence[Tensor], leaves: list, given: Sequence[Tensor], inputs: list) -> list[Tensor]:
        """The result of ``probes.backward`` for all probes at once, or for one after another through the same graph."""
        recorder = self.stream.recorder
        if self.stream.at_once:
            return backward(outputs, leaves, given, inputs)
        found, first = [], recorder.probe
        for recorder.probe in range(first, first + len(given[0])):
            one = [gradient[recorder.probe - first, None] for gradient in given]
            found.append(backward(outputs, leaves, one, inputs, keep_graph=True))
        recorder.probe = first
        return [torch.cat(each) for each in zip(*found)]


class Part(torch.autograd.Function):
    """A part of a model as one function, which keeps only what entered it."""

    @staticmethod
    def forward(ctx, call: PartCall, constant: list, results: list, inputs: int, *given: Tensor) -> tuple:
        """A link to the next parts, and the ``results``; ``given`` are the inputs and the links of the parts before."""
        ctx.call, ctx.links = call, [None] * (len(given) - inputs)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return torch.zeros(()), *results

    @staticmethod
    @over_probes
    def backward(ctx, link: None, *gradients: Tensor | None):
        return None, None, None, None, *ctx.call.gradients(gradients), *ctx.links


def own_copy(value: Any) -> Any:
    """A copy of a cache, so that a part that runs again does not find what it stored; other values as they are."""
    if not isinstance(value, Cache):
        return value
    copied = copy.copy(value)
    copied.layers = [copy.copy(layer) for layer in value.layers]
    return copied
