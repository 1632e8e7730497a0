"""The estimator: predicted forward error of low-precision passes, and what every kernel and weight contributes."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_core.adjoint import recomputed
from fragility_core.adjoint.arithmetic import LowArithmetic, mark_stream, store
from fragility_core.adjoint.overflow import first_nonfinite
from fragility_core.adjoint.rounding import expected_error, local_error
from fragility_core.adjoint.sites import Sites
from fragility_core.adjoint.tape import Tape
from fragility_core.arithmetic import attention
from fragility_core.arithmetic.lookup import elementwise_modules
from fragility_core.arithmetic.lowering import LowPrecision, sharing_copy
from fragility_core.arithmetic.operands import linear_weights, storages
from fragility_core.models.tree import final_hidden, is_block


@dataclass(frozen=True)
class Prediction:
    """What one forward and backward pass a window predict.

    It is of passes in ``format`` over windows of ``length`` tokens, in which the modules at the paths ``ran`` ran.

    ``kernels`` has one row per window, probe and place where values are rounded: its contribution
    ``c2`` to E||E_L||^2 and where it belongs; rows of any selection may be summed. ``windows`` has one
    row per window: the ``predicted`` mismatch, its ``standard_error`` over the probes (NaN for one),
    the ``final_norm`` ||X_L||, and in ``overflow`` the module that first gave a value that is not finite, or
    in which a kernel did ("" where none did); the prediction is then not finite either. A mixture's
    changes of experts are not seen: see ``routing``.
    """

    kernels: pd.DataFrame
    windows: pd.DataFrame
    format: str
    length: int
    ran: frozenset[str]


def predict(kernels: pd.DataFrame, windows: pd.DataFrame) -> pd.DataFrame:
    """``predicted`` mismatch and ``standard_error`` of every row of ``windows`` from the rows ``kernels`` alone.

    Leave rows out to predict the mismatch without those roundings; windows may be left out, too. The
    prediction is sqrt(sum c^2) / ||X_L||, the sum averaged over probes; its error is to first order in
    that of the average.
    """
    probe, distinct = pd.factorize(kernels.probe)
    probes = max(1, len(distinct))
    totals = np.zeros((len(windows), probes))  # a NaN in it stays, which pandas would skip
    rows = pd.Index(windows.window).get_indexer(kernels.window)
    known = rows >= 0
    np.add.at(totals, (rows[known], probe[known]), kernels.c2[known])
    root = totals.mean(1) ** 0.5
    spread = totals.std(1, ddof=1) / probes**0.5 if probes > 1 else np.nan
    return windows.assign(predicted=root / windows.final_norm, standard_error=spread / (2 * root * windows.final_norm))


class Adjoint:
    """Predicts the mismatch of low-precision passes, window by window (see the package's docstring).

    The pass that is differentiated is the low-precision pass itself, in fp32 tensors: it costs fp32
    copies of the weights, and no full-precision model is needed.
    """

    def __init__(
        self,
        low: LowPrecision,
        reference: nn.Module | None = None,
        probes: int = 1,
        seed: int = 0,
        output: Callable[[nn.Module, Tensor], Tensor] = final_hidden,
    ):
        """``low`` is the model as it runs, with the attention that it is set to.

        ``reference`` is the fp32 model before its weights were rounded: their errors are then known, else
        expected from their magnitude. ``probes`` random sign vectors, drawn from ``seed``, are averaged
        over. ``output`` gives the tensor (B, ...) whose error is predicted, and may call the model as it
        likes: ``lambda model, tokens: model(tokens, attention_mask=tokens != pad).logits``. Weights are read
        once, here: after they have changed, make another. Raises ValueError for a
        format that rounds no results (fp32, tf32), a model without parameters in it, fewer than one probe,
        or a reference that is not in fp32 or whose parameters are not those of the model.
        """
        if low.format.compute_dtype == torch.float32:
            raise ValueError(f"the format must round every kernel's result, as bf16 or fp16 do, got {low.format.name}")
        if probes < 1:
            raise ValueError(f"probes must be at least 1, got {probes}")
        self.low, self.format = low, low.format
        self.probes, self.seed, self.output = probes, seed, output
        self.model = sharing_copy(low.model)
        self.tape, self._lock = Tape(), threading.Lock()
        self._sites = pd.DataFrame()
        stored = linear_weights(self.model) if low.format.operands else {}
        self._linear = {path: p for path, p in stored.items() if p.dtype == self._dtype}
        weights, buffers = self._watch_stored(reference)
        stochastic, rounding = low.execution == "stochastic", not low.weights_only
        linear = storages(weights[id(p)] for p in self._linear.values())
        self.arithmetic = LowArithmetic(low.format, self.tape, weights, buffers, linear, stochastic, rounding)
        self._follow_modules()
        if not stochastic:
            self._recompute(rounding)

    @property
    def _dtype(self) -> torch.dtype:
        """Of the parameters whose rounding counts."""
        return torch.float32 if self.low.weights_only else self.format.compute_dtype

    def _watch_stored(self, reference: nn.Module | None) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """fp32 tensors, by the id of the parameter or the buffer they stand for, whose gradients go to the tape."""
        dtype = self._dtype
        floating = {path: p for path, p in self.model.named_parameters() if p.is_floating_point()}
        if not any(p.dtype == dtype for p in floating.values()):
            raise ValueError(f"the model must store parameters as {dtype}, as lower() does, got none")
        buffers = {} if self.low.weights_only else {p: x for p, x in self.model.named_buffers() if x.dtype == dtype}
        exact = None if reference is None else exact_tensors(reference, floating | buffers)
        leaves = {}
        for path, stored in (floating | buffers).items():
            low = stored.dtype == dtype
            leaf = stored.detach().float()  # of fp32 ones too: gradients are the tape's, not the model's
            if exact is not None:  # fp32 ones may hold rounded values: norms beside an fp32 stream
                error = partial(local_error, exact[path], leaf.detach())
            else:
                format = self.format.operands if path in self._linear else self.format
                error = partial(expected_error, leaf.detach(), format)
            if low or exact is not None:
                leaf.requires_grad_()
                self.tape.watch_leaf(self.tape.weight(path), leaf, error)
            leaves[path] = store(leaf, "weight") if low and path in floating else leaf
        self._versions = [(parameter, parameter._version) for parameter in floating.values()]
        return {id(x): leaves[p] for p, x in floating.items()}, {id(x): leaves[p] for p, x in buffers.items()}

    def _follow_modules(self) -> None:
        """Let the tape know which module's forward is running, and which tensor a block adds to."""
        tape = self.tape
        for path, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda module, args, path=path: tape.enter(path))
            module.register_forward_hook(lambda module, args, output: tape.leave())
            if is_block(path):
                module.register_forward_pre_hook(mark_stream, with_kwargs=True)

    def _recompute(self, rounding: bool) -> None:
        """Let the costly parts of the model run as one autograd function each."""
        implementation = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        by_rows = not self.format.scaled  # each block of rows would have a scale of its own
        if implementation == attention.OBSERVED_EAGER and by_rows:
            self.model.set_attn_implementation(recomputed.RECOMPUTED_EAGER if rounding else "sdpa")
        for module in elementwise_modules(self.model) if not self.format.scaled else ():
            module.forward = recomputed.Activation(self.low, self.tape, module)

    def __call__(self, tokens: Tensor, counted: Tensor | None = None) -> Prediction:
        """Predict the mismatch of each window of ``tokens`` (B, T).

        ``counted`` (B, T) is True for the positions whose error counts, all unless given: the
        prediction is then of ||E_L|| / ||X_L|| over those. A window's prediction does not depend on the
        others. Raises ValueError for a model in training mode, or whose weights have changed.
        """
        if any(module.training for module in self.model.modules()):
            raise ValueError("a prediction needs the model in eval mode, got training mode: call model.eval()")
        if any(parameter._version != version for parameter, version in self._versions):
            raise ValueError("a prediction needs the weights as they were read, but they have changed: make an Adjoint")
        if not tokens.numel():
            raise ValueError(f"windows must hold tokens (B, T), got shape {tuple(tokens.shape)}")
        with self._lock, torch.inference_mode(False):
            return self._predict(tokens, counted)

    def _predict(self, tokens: Tensor, counted: Tensor | None) -> Prediction:
        self.tape.clear()
        norms = [
            self._passes(window, tokens[window : window + 1], None if counted is None else counted[window, :, None])
            for window in range(len(tokens))
        ]
        contributions = self.tape.contributions(len(tokens), self.probes)
        inside = self.tape.overflows()
        for window, place in inside.items():  # what follows from an infinity is no small error
            contributions[window, :, place] = np.nan
        norms = torch.stack(norms).cpu().double()
        contributions[~norms.isfinite().numpy()] = np.nan
        prediction = self._prediction(contributions, norms, tokens.shape[-1])
        return self._name_overflow(prediction, tokens, inside)

    def _passes(self, window: int, tokens: Tensor, counted: Tensor | None) -> Tensor:
        """One forward and all backward passes of a window; the norm of the final state, on the device."""
        tape = self.tape
        tape.begin(window)
        with self.arithmetic, torch.enable_grad():
            final = self.output(self.model, tokens)  # (1, T, d)
        scope = 1.0 if counted is None else counted
        generator = torch.Generator(final.device).manual_seed(self.seed)
        for probe in range(self.probes):
            tape.probe = probe
            final.backward(random_signs(final, generator) * scope, retain_graph=probe < self.probes - 1)
        return torch.linalg.vector_norm(final.detach() * scope)

    def _prediction(self, contributions: np.ndarray, norms: Tensor, length: int) -> Prediction:
        """Tidy rows from c^2 (windows, probes, places) and the norms (windows,) of the final states."""
        if len(self._sites) < len(self.tape.places):
            self._sites = Sites(self.model, self.tape).table()
        window, probe, place = (axis.ravel() for axis in np.indices(contributions.shape))
        where = pd.DataFrame({"window": window, "probe": probe, "kernel": place})
        sites = self._sites.iloc[place].reset_index(drop=True)
        kernels = pd.concat([where, sites], axis=1).assign(c2=contributions.ravel())
        windows = pd.DataFrame({"window": range(len(norms)), "final_norm": norms.numpy()})
        return Prediction(kernels, predict(kernels, windows), self.format.name, length, frozenset(self.tape.ran))

    def _name_overflow(self, prediction: Prediction, tokens: Tensor, inside: Mapping[int, int]) -> Prediction:
        """Name the module where windows with a nonfinite prediction overflowed.

        ``inside`` has the place of a kernel that stored +inf, by window: its module's result may be finite.
        """
        modules = [place.module for place in self.tape.places]
        windows = prediction.windows.assign(overflow="")
        for window in np.flatnonzero(~np.isfinite(windows.predicted)):
            path = first_nonfinite(self.low, lambda model, x=tokens[window : window + 1]: self.output(model, x))
            within = modules[inside[window]] or "the model" if window in inside else "the gradient"
            windows.loc[window, "overflow"] = path or within
        return replace(prediction, windows=windows)


def exact_tensors(reference: nn.Module, rounded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers of the fp32 ``reference`` by path, among them those for the ones that were ``rounded``.

    Raises ValueError where they are not of fp32, or not those of the model.
    """
    exact = {path: p.detach() for path, p in reference.named_parameters(remove_duplicate=False)}
    exact |= {path: x.detach() for path, x in reference.named_buffers(remove_duplicate=False) if path in rounded}
    if other := sorted({str(p.dtype) for p in exact.values() if p.is_floating_point()} - {"torch.float32"}):
        raise ValueError(f"the reference must be in fp32, before its weights were rounded, got {', '.join(other)}")
    for path, parameter in rounded.items():
        if path not in exact or exact[path].shape != parameter.shape:
            found = f"the shape {tuple(exact[path].shape)}" if path in exact else "no such parameter"
            raise ValueError(
                "the reference must be the model before its weights were rounded, "
                f"with {path} of shape {tuple(parameter.shape)}, got {found}"
            )
    return exact


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Independent +1 and -1 of the shape of ``like``."""
    return torch.randint(2, like.shape, generator=generator, device=like.device) * 2.0 - 1
