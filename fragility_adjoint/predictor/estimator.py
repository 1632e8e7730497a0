"""The estimator: predicted forward error of low-precision passes, and what every rounding contributes to it."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fragility_adjoint import internals
from fragility_adjoint.predictor import recomputed
from fragility_adjoint.predictor.arithmetic import LowArithmetic
from fragility_adjoint.predictor.overflow import Overflow, first_overflow, with_overflows
from fragility_adjoint.predictor.parameters import RoundedParameters
from fragility_adjoint.predictor.prediction import Prediction, predict
from fragility_adjoint.predictor.probes import backward
from fragility_adjoint.predictor.recorder import ErrorRecorder
from fragility_adjoint.predictor.secant import SecantArithmetic
from fragility_adjoint.predictor.sites import Sites
from fragility_adjoint.predictor.streamed import Stream
from fragility_adjoint.predictor.targets import Output, Target, get_target
from fragility_adjoint.predictor.windows import Window, windows_of
from fragility_core.models.paths import is_block
from fragility_numerics.attention import OBSERVED_EAGER, register_attention
from fragility_numerics.internals import attention_of, replace_forward, without_function_modes
from fragility_numerics.lookup import elementwise_modules
from fragility_numerics.lowering import LowPrecision, require_low, sharing_copy
from fragility_numerics.nested import map_tensors
from fragility_offload.lockstep import side_by_side
from fragility_offload.offloaded import is_offloaded
from fragility_quantization.quantized import recipe_of

NormAndError = tuple[Tensor, Tensor | None]  # of a window's output, see ``Adjoint._passes``
GRADIENTS = ("low", "fp32", "both", "secant")  # where gradients are taken


class Adjoint:
    """Predicts the error of low-precision passes, window by window (see the docstring of the package).

    What is differentiated is the low-precision pass itself, in fp32 tensors. This takes memory for fp32 copies of the
    weights. No pass in full precision is needed. Where there is one, gradients may also be taken there.
    """

    @torch.inference_mode(False)
    def __init__(
        self, low: LowPrecision, reference: nn.Module | None = None, probes: int = 1, seed: int = 0,
        target: str | Target | Output = "hidden", gradients: str = "auto",
        beside: "Adjoint | None" = None,
    ):  # fmt: skip
        """``low`` is the model as it runs, with the attention that it is set to.

        ``reference`` is the fp32 model before its weights were rounded. With it the errors of weights are known,
        without it expected from their magnitude. The prediction is averaged over ``probes`` random sign vectors, drawn
        from ``seed``. Weights are read once, here.

        ``target`` is one of ``targets.TARGETS`` by name, or a function that gives the tensor (B, T, ...) whose error is
        predicted. It may call the model in any way:
        ``lambda model, tokens: model(tokens, attention_mask=tokens != pad).logits``.

        ``gradients`` are taken at the "low" point; at the "fp32" point, with the errors that rounding the values of the
        reference makes; or at "both", in twice the time. At both points a weight, whose error is the same at both
        ends, has the mean of its contributions there: the mean of two slopes is exact for what is quadratic in between.
        A kernel's error differs between the points; its contribution is the one at the fp32 point. "secant" runs
        both passes side by side, and takes the slopes between them (``secant``): signed contributions then add up to
        the measured error. This takes several times as long, and keeps all values of both passes. "auto" is "both" with
        a reference and rounding to nearest, and else "low".

        ``beside`` is another estimator for the same ``low``, with which this one shares the fp32 copies of weights.

        Raises TypeError for a model that was not lowered. Raises ValueError for a recipe that rounds no results (fp32,
        tf32), for a model without parameters in the format, for fewer than one probe, for a reference that is not in
        fp32 or has other parameters, for gradients at a point that is not there, for secants of a streamed model, and
        for an estimator ``beside`` of another model or of weights that have changed since it read them.
        """
        require_low(low)
        recipe = recipe_of(low)
        if not (recipe.rounds or low.weights_only):
            raise ValueError(f"the recipe must round the results of kernels, as bf16 does, got {recipe.name}")
        referenced = reference is not None and low.execution != "stochastic"
        if gradients == "auto":
            gradients = "both" if referenced else "low"
        if gradients not in GRADIENTS:
            raise ValueError(f"gradients must be auto or taken at one of {', '.join(GRADIENTS)}, got {gradients!r}")
        if gradients != "low" and not referenced:
            raise ValueError(
                f'gradients={gradients!r} needs the fp32 reference, and rounding to nearest: use gradients="low"'
            )
        if gradients == "secant" and is_offloaded(low.model):
            raise ValueError('gradients="secant" needs all values of both passes, got a streamed model: load it whole')
        if not isinstance(probes, int | np.integer) or probes < 1:
            raise ValueError(f"probes must be an integer of at least 1, got {probes!r}")
        self.low, self.recipe, self.target = low, recipe, get_target(target)
        self.probes, self.seed, self.secant = probes, seed, gradients == "secant"
        self.at_once = True  # whether all probes share one backward pass; until that fails
        self._dtype = torch.float32 if low.weights_only else recipe.kernels.compute_dtype  # of rounded parameters
        rounds = self._dtype != torch.float32
        self.model: Any = sharing_copy(low.model)
        self.recorder, self.lock = ErrorRecorder(low.execution != "stochastic"), threading.Lock()
        self._sites = pd.DataFrame()
        self.rounded = rounded = RoundedParameters(low, self.model, reference, self.recorder, self._dtype)
        self._stream = Stream(self.model, rounded, self.recorder) if is_offloaded(self.model) else None
        stays = rounded.tensors if self._stream is None else self._stream.staying
        kept = stays if self._stream is None else []
        rounded.kept = {path: rounded.in_fp32(path) for path in kept} if beside is None else beside.shared(low)
        start = torch.zeros((), requires_grad=True)
        self._weights = AsRead.apply(start, *(p for path, p in rounded.parameters.items() if path in stays))
        stochastic = low.execution == "stochastic"
        self.points: list[LowArithmetic] = []
        for exact in {"fp32": [True], "both": [False, True]}.get(gradients, [False]):
            leaves = rounded.make_leaves(kept, exact, lambda _, n, x, w: self.recorder.watch_leaf(n, x, w, kept=True))
            how = self.recipe, self.recorder, leaves
            if self.secant:
                self.points.append(SecantArithmetic(*how, rounds, self.target.between))
            else:
                self.points.append(LowArithmetic(*how, stochastic, rounds, exact))
        self._follow_modules()
        if not (stochastic or self.secant):
            self._recompute(rounds)

    def _follow_modules(self) -> None:
        """Let the recorder know which module's forward is running, and mark the residual stream."""
        recorder = self.recorder
        for path, module in self.model.named_modules():
            module.register_forward_pre_hook(lambda module, args, path=path: recorder.enter(path))
            module.register_forward_hook(lambda module, args, output: recorder.leave())
            if is_block(path):
                module.register_forward_pre_hook(mark_block_input, with_kwargs=True)

    def _recompute(self, rounds: bool) -> None:
        """Run the costly parts of the model as one autograd function each."""
        if not self.recipe.kernels.elementwise:  # each block of rows would have a scale of its own
            return
        if attention_of(self.model) == OBSERVED_EAGER:
            register_attention(recomputed.RECOMPUTED_EAGER, recomputed.recomputed_attention)
            self.model.set_attn_implementation(recomputed.RECOMPUTED_EAGER if rounds else "sdpa")
        for module in elementwise_modules(self.model):
            replace_forward(module, recomputed.Activation(self.low, self.recorder, module))

    def shared(self, low: LowPrecision) -> dict[str, Tensor]:
        """The fp32 copies of weights by path, for another estimator of ``low``; raises ValueError for another model."""
        if low.model is not self.low.model:
            raise ValueError("estimators share the weights of one low-precision model, got two models: lower it once")
        self._require_unchanged()
        return self.rounded.kept

    def _require_unchanged(self) -> None:
        try:
            _ = self._weights.grad_fn.saved_tensors
        except RuntimeError:
            changed = "a prediction needs the weights as they were read, but they changed: make another Adjoint"
            raise ValueError(changed) from None

    @property
    def knows_signs(self) -> bool:
        """True if errors are those that rounding makes, with their signs; False if some have an expected size alone."""
        return self.rounded.exact is not None and self.low.execution != "stochastic"

    def __call__(
        self, tokens: Tensor, counted: Tensor | None = None, seeds: Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Prediction:  # fmt: skip
        """Predict the error of each window of ``tokens`` (B, T).

        ``counted`` (B, T) is True for the positions over which ||E_L|| and ||X_L|| are taken; all positions unless
        given. Padding counts nowhere: ``attention_mask`` (B, T) is 1 for tokens and 0 for padding before or after them,
        and each window is computed, and shown to the target, without it. ``seeds``, one a window, draw sign vectors;
        by default ``seed`` draws the same ones for all windows. A window's prediction depends on no other window. All
        windows share each read of a streamed model, and the inputs of each block are held for every window.

        Raises ValueError for a model in training mode, for weights that have changed since they were read, and for what
        ``windows_of`` and ``Window.counted`` refuse.
        """
        if any(module.training for module in self.model.modules()):
            raise ValueError("a prediction needs the model in eval mode, got training mode: call model.eval()")
        self._require_unchanged()
        with self.lock, torch.inference_mode(False):
            self.recorder.rewind()  # a prediction before may have been interrupted
            windows = windows_of(tokens, self.seed, seeds, counted, attention_mask)
            if self._stream is None:
                found = [each for window in windows for each in self._passes([window])]
            else:
                with self._stream:
                    found = self._passes(windows)
            lengths, errors = zip(*found)
            contributions = self.recorder.contributions(len(tokens), self.probes)

            @cache
            def search(number: int) -> Overflow | None:
                return first_overflow(self.low, lambda model: self.target.output(model, windows[number].tokens))

            inside, below = self.recorder.overflows()
            inside |= {n: place for n, place in below.items() if n not in inside and search(n)}  # masks store -inf, too
            for number, place in inside.items():  # an infinity is no small error
                contributions[:, number, :, place] = np.nan
            norms = torch.stack(lengths).cpu().double()
            contributions[:, ~norms.isfinite().numpy()] = np.nan
            prediction = self._prediction(contributions, norms, max(each.tokens.shape[-1] for each in windows))
            if self.secant:
                size, *products = torch.stack(errors, 1).cpu().double()
                left = torch.stack(products, 1) - torch.from_numpy(contributions[1].sum(-1))
                measured = (size / norms) ** (2 if self.target.squared else 1)
                prediction.windows.insert(3, "measured", measured.numpy())
                prediction.windows.insert(4, "remainder", (left.square().mean(1).sqrt() / size).numpy())
            places = list(self.recorder.places)
            return with_overflows(prediction, search, {number: places[place] for number, place in inside.items()})

    def _passes(self, windows: Sequence[Window]) -> list[NormAndError]:
        """Run the passes of ``windows``, side by side, at every point.

        Returns for each window the target's norm, on the device; and with secant slopes the norm of the measured error
        and its products with the probes.
        """
        signs: list[Tensor] = []  # the same ones at every point
        found = [self._passes_at(point, windows, signs) for point in self.points][-1]
        self.recorder.gather()
        return found

    def _passes_at(self, point: LowArithmetic, windows: Sequence[Window], signs: list[Tensor]) -> list[NormAndError]:
        both = len(self.points) > 1  # kernels then count at the fp32 point alone, weights by the mean of the two
        self.recorder.shares = {"kernel": float(point.exact or not both), "weight": 0.5 if both else 1.0}
        found = side_by_side([partial(self._forward, point, window) for window in windows])
        finals, leaves = [final for final, _ in found], [leaf for _, own in found for leaf in own]
        signs += [window.signs(final, self.probes) for window, final in zip(windows[len(signs) :], finals)]
        self._backward(finals, leaves, signs)
        return [self._norm_and_error(*each) for each in zip(windows, finals, signs)]

    def _forward(self, point: LowArithmetic, window: Window) -> tuple[Tensor, list[Tensor]]:
        """The target's output (1, T, ...) for ``window``, and the leaves from which it was computed."""
        self.recorder.begin(window.number)
        arithmetic, *ends = [point] if self._stream is None else self._stream.begin(point)
        with arithmetic, torch.enable_grad():
            final = self.target.output(self.model, window.tokens)
        return final, [*self.recorder.now.leaves, *arithmetic.parameters.leaves, *ends]

    def _norm_and_error(self, window: Window, final: Tensor, signs: Tensor) -> NormAndError:
        counted = window.counted(final)
        if not self.secant:
            return self.target.norm(final.detach(), counted), None
        exact = internals.reference_of(final).detach()
        error = ((exact - final.detach()) * counted).flatten()
        products = signs.flatten(1) @ error
        return self.target.norm(exact, counted), torch.cat([torch.linalg.vector_norm(error)[None], products])

    def _backward(self, finals: list[Tensor], leaves: list[Tensor], signs: list[Tensor]) -> None:
        """Backward passes from ``finals`` for the probes ``signs`` (P, ...) of each: at once, or else one by one."""
        while self.at_once:
            before = self.recorder.mark()
            try:
                self._backward_once(finals, leaves, signs)
                return
            except RuntimeError as error:
                if not (internals.refused_by_vmap(error) or internals.out_of_memory(error)):
                    raise
                self.recorder.rewind(before)
                if self._stream is not None and self._stream.at_once:
                    self._stream.at_once = False  # in each part one by one, so that it is read once
                else:
                    self.at_once = False
        try:
            for probe, each in enumerate(zip(*signs)):
                self.recorder.probe = probe
                self._backward_once(finals, leaves, [gradient[None] for gradient in each])
        finally:
            self.recorder.probe = 0

    def _backward_once(self, finals: list[Tensor], leaves: list[Tensor], signs: list[Tensor]) -> None:
        with internals.without_vmap_fallback(), nullcontext() if self._stream is None else self._stream.backward():
            backward(finals, leaves, signs, keep_graph=True)

    def _prediction(self, contributions: np.ndarray, norms: Tensor, length: int) -> Prediction:
        """Tidy tables of the recorder's ``contributions`` (2, windows, probes, places) and the target's norms (W,)."""
        if len(self._sites) < len(self.recorder.places):
            self._sites = Sites(self.model, self.recorder).table()
        c2, signed = contributions
        if not self.knows_signs:
            signed = np.full_like(signed, np.nan)
        window, probe, place = (axis.ravel() for axis in np.indices(contributions.shape[1:]))
        rows = pd.DataFrame({"window": window, "probe": probe, "place": place})
        sites = self._sites.iloc[place].reset_index(drop=True)
        rows = pd.concat([rows, sites], axis=1).assign(c2=c2.ravel(), signed=signed.ravel())
        windows = pd.DataFrame({"window": range(len(norms)), "norm": norms.numpy()})
        predicted = predict(rows, windows, self.target.squared)
        return Prediction(rows, predicted, self.recipe, self.target, length, frozenset(self.recorder.ran))


class AsRead(torch.autograd.Function):
    """A result that remembers ``weights`` as they are now: autograd gives none back that was changed in place."""

    @staticmethod
    def forward(ctx, start: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return start.clone()


def mark_block_input(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A hook before the forward of ``block``: the tensor that the block receives is the residual stream.

    The block gets tensors of its own. So gradients of what all blocks share (rotary embeddings) are first added up in
    each block, as in streamed passes, and both forms give the same bits.
    """
    with without_function_modes():
        args, kwargs = internals.entering(block, args, kwargs)
    stream = args[0] if args else kwargs.get("hidden_states")
    if isinstance(stream, Tensor):
        internals.mark_stream(stream)

    def own(x: Tensor) -> Tensor:
        return internals.copy_marks(x, x.view_as(x)) if x.requires_grad and x is not stream else x

    with without_function_modes():
        return map_tensors((args, kwargs), own)
