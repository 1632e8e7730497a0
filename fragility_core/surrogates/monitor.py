"""One low-precision forward pass that measures every statistic of the score on the way.

The model runs as transformers ships it. Hooks see the sites of each block, and the observed attention shows scores
and probabilities. Statistics accumulate on the device in fp32 (``reductions`` names the exceptions), and leave it once
per batch, one value per window and block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fragility_core.models.blocks import Block, blocks
from fragility_core.models.norms import Norm
from fragility_core.models.padding import groups, require_tensor, require_tokens
from fragility_core.models.paths import final_hidden, hidden_and_logits
from fragility_core.surrogates import reductions
from fragility_core.surrogates.observation import Observation, joined
from fragility_core.surrogates.reductions import segment_norms, whole_norm, window_max
from fragility_core.surrogates.transport import branch_jacobian_norm
from fragility_core.surrogates.weights import WeightStatistics
from fragility_core.theory import mismatch
from fragility_numerics.attention import observers, observing_attention
from fragility_numerics.lowering import LowPrecision, require_low
from fragility_numerics.nested import entering, together
from fragility_numerics.presence import loaded

# Values for blocks without norms of queries and keys, or without a gated MLP: they leave the transport unchanged.
NEUTRAL = {"query_gain": 1.0, "key_gain": 1.0, "up_max": 1.0, "activated_max": 0.0}

# Norms whose output's norm the score reads, by site; that of norm_1 it does not need.
READ = {"2": "norm_2_norm", "1_out": "attention_norm", "2_out": "mlp_norm"}


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Row numbers on the device, kept there: a new copy for every block would wait for the device."""
    return torch.tensor(rows, device=device)


class PassRecord:
    """Measurements of a pass so far: named tensors of every block, and the arguments of the blocks' calls."""

    def __init__(self, depth: int):
        self.depth = depth
        self.small: dict[str, dict[int, Tensor]] = {}
        self.large: dict[str, Tensor] = {}
        self.apart: list[tuple[Tensor, Tensor]] = []  # entries of large values, and those written on other devices
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def write(self, layer: int, **values: Tensor) -> None:
        """Keep ``values`` of block ``layer``. Values named ``*_norm`` are norms of segments, (B, segments)."""
        for name, value in values.items():
            self.small.setdefault(name, {})[layer] = value

    def allocate(self, layer: int, name: str, *shape: int, like: Tensor) -> Tensor:
        """Zeros of ``shape`` and of the dtype of ``like``, for a large value of block ``layer`` to be written to.

        The first call allocates for all blocks. Large tensors that stay, allocated between the temporary tensors of
        a block, would fragment a CPU's heap and raise the peak memory by a third.
        """
        if name not in self.large:
            self.large[name] = like.new_zeros(self.depth, *shape)
        own = self.large[name][layer]
        if own.device == like.device:
            return own
        self.apart.append((own, like.new_zeros(shape)))
        return self.apart[-1][1]

    def call(self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A hook before the forward of ``block`` that keeps its arguments."""
        self.calls.append(entering(block, args, kwargs))

    def stacked(self, device: torch.device) -> dict[str, Tensor]:
        """The values of all blocks under each name, (L, ...), with norms of windows (L, B) for those of segments."""
        for own, written in self.apart:
            own.copy_(written)
        values, norms = {}, {}
        for name, measured in self.small.items():
            first = next(iter(measured.values()))
            neutral = first if len(measured) == self.depth else torch.full_like(first, NEUTRAL[name])
            each = [measured.get(layer, neutral).to(device) for layer in range(self.depth)]
            if not name.endswith("_norm"):
                values[name] = torch.stack(each)
                continue
            if len({x.shape for x in each}) > 1:  # the number of segments differs with the reach of attention
                each = [whole_norm(x)[:, None] for x in each]
            norms[name] = whole_norm(torch.stack(each))
        return values | norms | {name: value.to(device) for name, value in self.large.items()}

    def statistics(self, epsilons: Tensor, sites: Sequence[str], width: int) -> dict[str, Tensor]:
        """All statistics, (L, B) each, from ``epsilons`` (L, N) of the norms at ``sites`` and ``width``, d_model."""
        stacked = self.stacked(epsilons.device)  # kernels over small tensors run once for all blocks
        grams = stacked.pop("value_gram")  # (L, B, H, d, d)
        stacked["value_norm"] = grams.diagonal(dim1=-2, dim2=-1).float().sum((-2, -1)).sqrt()
        stacked["value_spectral_norm"] = reductions.spectral_norm_from_gram(grams).amax(-1)
        samples = stacked.pop("probability_sample")  # (L, B, H, 16, T)
        parts = samples.split(max(1, 2**19 // samples[0].numel()))  # several blocks, as many as fit a CPU's cache
        sensitivities = [reductions.softmax_sensitivity_estimate(part).amax((-2, -1)) for part in parts]
        stacked["softmax_sensitivity"] = torch.cat(sensitivities)
        for number, site in enumerate(sites):
            mean, scale = stacked.pop(f"mean_{site}"), stacked.pop(f"scale_{site}")  # (L, B, T)
            # The kernel's scale is 1 / sqrt(sigma^2 + epsilon).
            variance = (scale**-2 - epsilons[:, number, None, None]).clamp_min(0)
            stacked[f"input_{site}_norm"] = (width * (variance + mean**2)).sum(-1).sqrt()
            stacked |= {f"variance_{site}": variance.mean(-1), f"variance_{site}_min": variance.amin(-1)}
        return stacked


class AttentionStatistics:
    """An ``AttentionObserver`` that measures one attention module over its blocks of query rows."""

    def __init__(self, paused: Callable[[], AbstractContextManager[None]], scaling: float, allocate: partial[Tensor]):
        """Scores are ``scaling`` times Q K^T. ``allocate`` is ``PassRecord.allocate`` for the module's block."""
        self.paused, self.scaling, self.allocate = paused, scaling, allocate

    def begin(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        if hasattr(self, "rows"):
            raise ValueError("the score needs a model that runs each block once a pass, got a block that runs again")
        batch, heads, rows, _ = query.shape
        self.rows = reductions.sampled_rows(rows)
        self.scored, self.weighted = list[Tensor](), list[Tensor]()  # norms of segments, of scores and probabilities
        with self.paused():
            self.query_norm, self.key_norm = segment_norms(query), segment_norms(key)
            if scaling != self.scaling:  # the query that came is scaled already
                self.query_norm = self.query_norm * (scaling / self.scaling)
            # bf16 products change ||V||_2 by at most 2^-9 sqrt(d) of itself. fp16 products may overflow.
            wide = value if value.dtype == torch.bfloat16 else value.float()
            wide = wide.flatten(0, 1)
            gram = self.allocate("value_gram", batch, heads, wide.shape[-1], wide.shape[-1], like=wide)
            torch.bmm(wide.mT, wide, out=gram.flatten(0, 1))
            self.sample = self.allocate("probability_sample", batch, heads, len(self.rows), key.shape[2], like=query)

    def scores(self, scores: Tensor) -> None:
        with self.paused():
            self.scored.append(segment_norms(scores))

    def probabilities(self, first_row: int, probabilities: Tensor) -> None:
        _, _, rows, seen = probabilities.shape
        inside = [i for i, row in enumerate(self.rows) if first_row <= row < first_row + rows]
        with self.paused():
            self.weighted.append(segment_norms(probabilities))
            if inside:
                chosen = _index(tuple(self.rows[i] - first_row for i in inside), probabilities.device)
                sampled = self.sample[:, :, inside[0] : inside[-1] + 1, :seen]
                sampled.copy_(probabilities.index_select(2, chosen))

    def result(self) -> dict[str, Tensor]:
        """Norms of segments, (B, segments) each. Raises ValueError if the attention ran unseen."""
        if not hasattr(self, "rows"):
            raise ValueError("the score needs one configuration for all blocks, got a block copied with its own")
        return {
            "query_norm": self.query_norm, "key_norm": self.key_norm,
            "score_norm": torch.cat(self.scored, -1), "probability_norm": torch.cat(self.weighted, -1),
        }  # fmt: skip


class Monitor:
    """Monitored low-precision passes of a Hugging Face decoder (protocol section 3).

    The protocol describes GPT-2. Other families are read as follows. RMSNorm is measured as LayerNorm, with the mean
    square for the variance. A gated MLP is W_out g with g = act(W_gate z) * W_up z. Its remainder has
    ||W_in|| ||z|| for both products that read z, with W_in = [W_gate; W_up] (Lemma 2 (`lem:gemm-out`)), and
    ||W_out|| ||g||; the rounding of the product * is left out, as the activation's is. Keys and values of a group
    count once for each of its query heads. Queries and keys are those that the scores multiply: after rotary
    embeddings, which change no norm, and after their own norms. If only some blocks have a gated MLP or norms of
    queries and keys, the other blocks have the values of NEUTRAL in their columns.

    The weights may change between passes if ``refresh()`` or ``follow()`` is called. LayerNorm's epsilon may change at
    any time. The model itself stays as it is: hooks and the observed attention are there during a pass only.
    """

    @torch.inference_mode(False)
    def __init__(self, low: LowPrecision, power_iteration: bool = False):
        """``power_iteration`` also measures ||J_f||_2 of every block (Appendix A.7 (`app:estimation`), option i).

        Raises TypeError for a model that was not lowered and for an architecture whose blocks are not known, and
        ValueError for a recipe with other numbers in linear layers or the cache.
        """
        require_low(low)
        if not low.plain:
            raise ValueError(
                f"the score has one unit roundoff for all of a model, got {low.name}, whose linear layers or "
                "cache have another: predict its mismatch with fragility_adjoint.predictor.Adjoint"
            )
        self.low, self.power_iteration = low, power_iteration
        self.model: PreTrainedModel = low.model
        self.blocks = blocks(self.model)
        self.weight_statistics = WeightStatistics(self.blocks)
        self.refresh()

    def refresh(self) -> None:
        """Measure the statistics of the weights again, exactly."""
        self.weights = self.weight_statistics.measure()

    def follow(self) -> None:
        """Update the statistics of the weights after a small change, with norms slightly below the exact ones.

        The transport estimator ``operator_norm`` is then no upper bound (``WeightStatistics.follow``).
        """
        self.weights = self.weight_statistics.follow()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which calling ``model`` computes what a monitored pass computes, without measuring."""
        with observing_attention(self.model), self.low.running():
            yield

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, reference: Tensor | None = None, loss: bool = False, attention_mask: Tensor | None = None
    ) -> Observation:
        """Monitor one pass over ``tokens`` (B, T).

        With ``reference``, the fp32 hidden states (B, T, d_model) of the same windows, the window rows have the
        ``mismatch``. With ``loss`` (models with a head) they have the mean next-token cross entropy in nats. With an
        ``attention_mask`` (B, T), 1 for tokens and 0 for padding, windows of one length share a pass without padding,
        so that padding counts in no statistic. Raises TypeError for tokens that are no tensor. Raises ValueError for a
        model in training mode, and for tokens, a mask (``padding.spans``) or a reference of another shape.
        """
        require_tensor(tokens)
        if tokens.device.type == "cpu" or tokens.ndim != 2 or not tokens.numel():  # on a GPU to read them is to wait
            require_tokens(tokens, self.model)
        if any(module.training for module in self.model.modules()):
            raise ValueError("a monitored pass needs the model in eval mode, got training mode: call model.eval()")
        if reference is not None and reference.shape[:-1] != tokens.shape:
            raise ValueError(
                f"a reference must have a state for every token, {(*tokens.shape, 'd_model')}, got shape "
                f"{tuple(reference.shape)}: give the fp32 states of the same windows"
            )
        if attention_mask is not None:
            alike = groups(tokens, attention_mask)
            known = [None if reference is None else group.of(reference) for group in alike]
            return joined(alike, [self(g.of(tokens), own, loss) for g, own in zip(alike, known)], tokens.shape[1])
        record = PassRecord(len(self.blocks))
        with ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                for handle in self._attach(block, layer, record, len(tokens)):
                    stack.callback(handle.remove)
                stack.callback(observers.pop, block.attention, None)
            stack.enter_context(self.running())
            hidden, logits = hidden_and_logits(self.model, tokens) if loss else (final_hidden(self.model, tokens), None)
        epsilons = torch.tensor([[n.eps for n in b.norms.values()] for b in self.blocks], pin_memory=hidden.is_cuda)
        epsilons = epsilons.to(hidden.device, non_blocking=True)
        statistics = record.statistics(epsilons, [*self.blocks[0].norms], self.blocks[0].width)
        if self.power_iteration:
            with observing_attention(self.model):
                norms = [jacobian_norm(block, call) for block, call in zip(self.blocks, record.calls)]
            statistics["branch_jacobian_norm"] = torch.stack(together(norms))
        window = {"final_norm": torch.linalg.vector_norm(hidden.float().flatten(1), dim=-1)}
        if reference is not None:
            window["mismatch"] = mismatch(hidden, reference)
        if logits is not None:
            window["loss"] = window_losses(logits, tokens)
        return Observation(*self._collect(statistics, window), hidden, self.low.format.unit_roundoff)

    def _collect(self, statistics: dict[str, Tensor], window: dict[str, Tensor]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Statistics (L, B) and (B,) as tidy rows, with a single transfer from the device."""
        depth, batch = next(iter(statistics.values())).shape
        per_block = torch.stack(list(statistics.values())).flatten()
        values = torch.cat(together([per_block, *window.values()])).cpu().double().numpy()
        columns = values[: per_block.numel()].reshape(-1, depth, batch).transpose(0, 2, 1).reshape(-1, batch * depth)
        epsilons = {f"epsilon_{site}": [b.norms[site].eps for b in self.blocks] for site in self.blocks[0].norms}
        layers = pd.DataFrame(
            {"window": np.repeat(np.arange(batch), depth), "layer": np.tile(np.arange(depth), batch)}
            | dict(zip(statistics, columns))
            | {name: np.tile(column, batch) for name, column in (self.weights | epsilons).items()}
        )
        windows = dict(zip(window, values[per_block.numel() :].reshape(len(window), batch)))
        return layers, pd.DataFrame({"window": np.arange(batch)} | windows)

    def _attach(self, block: Block, layer: int, record: PassRecord, windows: int) -> Iterator[RemovableHandle]:
        """Hooks that write the statistics of ``block`` to ``record``; yields their handles."""
        paused, write, allocate = self.low.paused, partial(record.write, layer), partial(record.allocate, layer)
        observers[block.attention] = attention = AttentionStatistics(paused, block.score_scaling, allocate)

        def by_window(x: Tensor) -> Tensor:  # OPT's MLP gets the tokens of all windows in one dimension
            return x if x.ndim > 2 else x.unflatten(0, (windows, -1))

        def observe(module: nn.Module, measure: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> RemovableHandle:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                with paused():
                    write(**measure(by_window(args[0]), by_window(output)))

            return module.register_forward_hook(hook)

        def linear_site(before: str, after: str, x: Tensor, output: Tensor) -> dict[str, Tensor]:
            return {before: segment_norms(x), after: segment_norms(output)}

        def attention_site(*call: Tensor) -> dict[str, Tensor]:
            return attention.result() | linear_site("context_norm", "attention_norm", *call)

        def head_norm_site(heads: str, norm: Norm, x: Tensor, _: Tensor) -> dict[str, Tensor]:
            _, _, scale = normalization_path(norm, x.flatten(1, -2))  # of heads (B, T, H, d)
            return {f"{heads}_gain": norm.gamma.abs().amax() * scale.amax(-1)}  # the largest

        if self.power_iteration:
            yield block.module.register_forward_pre_hook(record.call, with_kwargs=True)
        yield observe(block.attention_out, attention_site)
        yield observe(block.mlp_out, partial(linear_site, "activation_norm", "mlp_norm"))
        for site, norm in block.norms.items():  # a norm behind a sublayer writes what the branch adds after it
            yield observe(norm.module, partial(norm_site, norm, site))
        if block.norm_1 is None:
            yield observe(block.query.modules[0], lambda x, _: {"input_1_norm": segment_norms(x)})
        if block.norm_2 is None:
            names = "input_2_norm", "norm_2_norm"
            yield observe(block.mlp_in.modules[0], lambda x, _: dict.fromkeys(names, segment_norms(x)))
        for heads, norm in block.head_norms.items():
            yield observe(norm.module, partial(head_norm_site, heads, norm))
        if (up := block.up) is not None:
            yield observe(block.activation, lambda _, output: {"activated_max": window_max(output)})
            yield observe(up.modules[0], lambda _, output: {"up_max": window_max(up.of(output))})


def jacobian_norm(block: Block, call: tuple[tuple[object, ...], dict[str, object]]) -> Tensor:
    """``transport.branch_jacobian_norm`` of a ``block`` in a ``call`` of it."""
    with loaded(block.module):
        return branch_jacobian_norm(block.module, *call)


def norm_site(norm: Norm, site: str, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """Mean and scale of ``x`` (B, T, d_model) in the ``norm`` at ``site`` of ``Block.norms``, and norms of results."""
    path, mean, scale = normalization_path(norm, x)
    measured = {f"mean_{site}": mean, f"scale_{site}": scale, f"path_{site}_norm": segment_norms(path)}
    if site in READ:
        measured[READ[site]] = segment_norms(output)
    return measured


def normalization_path(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Z, mean and 1 / sqrt(sigma^2 + epsilon) of ``x`` (B, T, d_model) (``reductions.layernorm_with_moments``)."""
    compute = reductions.layernorm_with_moments if norm.centred else reductions.rmsnorm_with_moments
    return compute(x, norm.gamma, norm.eps)


def window_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats of each window, (B, T, vocabulary) -> (B,), in fp32."""
    predicted, expected = logits[:, :-1].float(), tokens[:, 1:]
    # The vocabulary comes last: along any other axis the softmax is several times slower.
    losses = functional.cross_entropy(predicted.flatten(0, 1), expected.flatten().long(), reduction="none")
    return losses.view(expected.shape).mean(-1)
