"""One low-precision forward pass, and every statistic of the score measured on the way.

The model runs as transformers ships it: hooks see the sites of each block, the registered attention
function shows scores and probabilities. Statistics accumulate on the device, in fp32 but where ``reductions``
says otherwise, and leave it once per batch, one value per window and block.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from fragility_core.arithmetic.attention import observe_attention, observers
from fragility_core.arithmetic.emulation import LowPrecision
from fragility_core.models.architectures import Block, blocks
from fragility_core.models.norms import Norm
from fragility_core.models.tree import final_hidden, hidden_and_logits
from fragility_core.surrogates.reductions import (
    blocks_at_once,
    layernorm_with_moments,
    rmsnorm_with_moments,
    sampled_rows,
    segment_norms,
    softmax_sensitivity_estimate,
    spectral_norm_from_gram,
    whole_norm,
    window_max,
)
from fragility_core.surrogates.transport import branch_jacobian_norm
from fragility_core.surrogates.weights import WeightStatistics
from fragility_core.theory import mismatch


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # a cached tensor may meet a backward pass later
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Row numbers on the device; making them there again for every block would wait for the device."""
    return torch.tensor(rows, device=device)


class Records:
    """Named tensors of every block of a pass."""

    def __init__(self, depth: int):
        self.depth = depth
        self.small: dict[str, dict[int, Tensor]] = {}
        self.large: dict[str, Tensor] = {}

    def write(self, layer: int, **values: Tensor) -> None:
        """Keep what was measured of block ``layer``."""
        for name, value in values.items():
            self.small.setdefault(name, {})[layer] = value

    def room(self, layer: int, name: str, *shape: int, like: Tensor) -> Tensor:
        """Zeros to write a large tensor of block ``layer`` to, of the dtype of ``like``.

        Large ones that outlive a block, allocated between its temporary ones, would leave holes in a CPU's
        heap that the next block's do not fit into: a third more memory at the peak.
        """
        if name not in self.large:
            self.large[name] = like.new_zeros(self.depth, *shape)
        return self.large[name][layer]

    def stacked(self) -> dict[str, Tensor]:
        """Each name's tensors of all blocks as one (L, ...), of norms (L, B) in place of those of their pieces."""
        blocks = {name: [values[layer] for layer in range(self.depth)] for name, values in self.small.items()}
        norms = {name: joined(blocks.pop(name)) for name in list(blocks) if name.endswith("_norm")}
        return {name: torch.stack(values) for name, values in blocks.items()} | norms | self.large


def joined(pieces: list[Tensor]) -> Tensor:
    """Norms (L, B) from those of the pieces (B, P) of L blocks, P of which may differ, as attention's reach may."""
    if len({x.shape for x in pieces}) > 1:
        pieces = [whole_norm(x)[:, None] for x in pieces]
    return whole_norm(torch.stack(pieces))


class AttentionStatistics:
    """Gathers the statistics of one attention module over its blocks of query rows."""

    def __init__(self, paused: Callable[[], AbstractContextManager], scaling: float, room: Callable[..., Tensor]):
        """``scaling``: scores are this times Q K^T; a query that comes already scaled is not Q.

        ``room`` is that of the module's block in ``Records``.
        """
        self.paused, self.scaling, self.room = paused, scaling, room

    def begin(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        batch, heads, rows, _ = query.shape
        self.rows = sampled_rows(rows)
        self.scored, self.weighted = [], []  # norms of pieces of scores and probabilities
        with self.paused():
            self.query_norm, self.key_norm = segment_norms(query), segment_norms(key)
            if scaling != self.scaling:
                self.query_norm = self.query_norm * (scaling / self.scaling)
            # In bf16 ||V||_2 is at most 2^-9 sqrt(d) off for it; in fp16 the products may overflow.
            wide = value if value.dtype == torch.bfloat16 else value.float()
            wide = wide.flatten(0, 1)
            gram = self.room("value_gram", batch, heads, wide.shape[-1], wide.shape[-1], like=wide)
            torch.bmm(wide.mT, wide, out=gram.flatten(0, 1))
            self.sample = self.room("probability_sample", batch, heads, len(self.rows), key.shape[2], like=query)

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
        """Norms of pieces (B, P); what else was measured is in its room."""
        return {
            "query_norm": self.query_norm, "key_norm": self.key_norm,
            "score_norm": torch.cat(self.scored, -1), "probability_norm": torch.cat(self.weighted, -1),
        }  # fmt: skip


def finished(records: Records, epsilons: Tensor, width: int) -> dict[str, Tensor]:
    """All statistics (L, B) from the records of L blocks, small kernels once for all blocks.

    ``epsilons`` (L, 2) are those of the two LayerNorm sites, ``width`` is d_model.
    """
    stacked = records.stacked()
    grams = stacked.pop("value_gram")  # (L, B, H, d, d)
    stacked["value_norm"] = grams.diagonal(dim1=-2, dim2=-1).float().sum((-2, -1)).sqrt()
    stacked["value_spectral_norm"] = spectral_norm_from_gram(grams).amax(-1)
    samples = stacked.pop("probability_sample")  # (L, B, H, 16, T)
    stacked["softmax_sensitivity"] = torch.cat(
        [softmax_sensitivity_estimate(part).amax((-2, -1)) for part in samples.split(blocks_at_once(samples))]
    )
    for site in ("1", "2"):
        mean, scale = stacked.pop(f"mean_{site}"), stacked.pop(f"scale_{site}")  # (L, B, T)
        # The kernel's scale is 1 / sqrt(sigma^2 + epsilon).
        variance = (scale**-2 - epsilons[:, int(site) - 1, None, None]).clamp_min(0)
        stacked[f"input_{site}_norm"] = (width * (variance + mean**2)).sum(-1).sqrt()
        stacked[f"variance_{site}"] = variance.mean(-1)
        stacked[f"variance_{site}_min"] = variance.amin(-1)
    return stacked


@dataclass(frozen=True)
class Observation:
    """What one monitored pass over a batch of windows saw.

    ``layers`` has one row per window and block, ``windows`` one row per window, both in order;
    ``hidden`` is the final hidden state (B, T, d_model), after the final norm, on the device.
    """

    layers: pd.DataFrame
    windows: pd.DataFrame
    hidden: Tensor


class Monitor:
    """Monitored low-precision passes of a Hugging Face decoder (protocol section 3).

    What the protocol says of GPT-2 is read as follows in other families. RMSNorm is measured as LayerNorm,
    with the mean square about 0 for the variance. Of a gated MLP, W_out (act(W_gate z) * W_up z), the
    remainder holds ||W_in|| ||z|| for both inner products, W_in = [W_gate; W_up] (Lemma 2 (`lem:gemm-out`)), and
    ||W_out|| ||g||, g being what W_out reads; the rounding of * is left out, as the activation's is. Its
    transport is ||m|| / ||r|| as ever. Keys and values of a group are counted once for each of its query
    heads. Queries and keys are those that meet in the scores, behind rotary embeddings, which turn them
    and change no norm, and behind norms of their own.

    The model's weights may change between passes if ``refresh()`` or ``follow()`` is called; LayerNorm's
    epsilon may change at any time.
    """

    def __init__(self, low: LowPrecision, power_iteration: bool = False):
        """``power_iteration`` also measures ||J_f||_2 of every block (Appendix A.7 (`app:estimation`), option i).

        The model of ``low`` runs with attention that can be observed from then on, monitored or not.
        Raises TypeError for an architecture whose blocks are not known.
        """
        if low.format.operands is not None:
            raise ValueError(
                f"the score has one unit roundoff for all of a model, got {low.format.name}, whose linear layers have "
                "another: predict its mismatch with fragility_core.adjoint.Adjoint"
            )
        self.low = low
        self.model: PreTrainedModel = low.model
        self.blocks = blocks(self.model)
        self.power_iteration = power_iteration
        observe_attention(self.model)
        self.weight_statistics = WeightStatistics(self.blocks)
        self.refresh()

    def refresh(self) -> None:
        """Measure the statistics that belong to the weights again, exactly."""
        self.weights = self.weight_statistics.measure()

    def follow(self) -> None:
        """Bring them up to date after the weights moved a little (``WeightStatistics.follow``)."""
        self.weights = self.weight_statistics.follow()

    @torch.no_grad()
    def __call__(self, tokens: Tensor, reference: Tensor | None = None, loss: bool = False) -> Observation:
        """Monitor one pass over ``tokens`` (B, T).

        With ``reference``, the fp32 hidden states (B, T, d_model) of the same windows, the window rows
        hold the ``mismatch``; with ``loss`` (models with a head) the mean next-token cross entropy.
        Raises ValueError for a model in training mode.
        """
        if self.model.training:
            raise ValueError("a monitored pass needs the model in eval mode, got training mode: call model.eval()")
        records = Records(len(self.blocks))
        inputs: list[tuple[tuple, dict]] = []
        with self._observing(records, inputs, len(tokens)), self.low.running():
            if loss:
                hidden, logits = hidden_and_logits(self.model, tokens)
            else:
                hidden, logits = final_hidden(self.model, tokens), None
        epsilons = torch.tensor([[b.norm_1.eps, b.norm_2.eps] for b in self.blocks], pin_memory=hidden.is_cuda)
        epsilons = epsilons.to(hidden.device, non_blocking=True)
        statistics = finished(records, epsilons, self.blocks[0].norm_1.gamma.numel())
        if self.power_iteration:
            norms = [branch_jacobian_norm(b.module, *call) for b, call in zip(self.blocks, inputs)]
            statistics["branch_jacobian_norm"] = torch.stack(norms)
        window = {"final_norm": torch.linalg.vector_norm(hidden.float().flatten(1), dim=-1)}
        if reference is not None:
            window["mismatch"] = mismatch(hidden, reference)
        if logits is not None:
            window["loss"] = window_losses(logits, tokens)
        return Observation(*self._collect(statistics, window), hidden)

    def _collect(self, statistics: dict[str, Tensor], window: dict[str, Tensor]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Statistics (L, B) and (B,) as tidy rows, through a single transfer from the device."""
        depth, batch = next(iter(statistics.values())).shape
        per_block = torch.stack(list(statistics.values())).flatten()
        values = torch.cat([per_block, *window.values()]).cpu().double().numpy()
        columns = values[: per_block.numel()].reshape(-1, depth, batch).transpose(0, 2, 1).reshape(-1, batch * depth)
        constants = self.weights | {
            "epsilon_1": [block.norm_1.eps for block in self.blocks],
            "epsilon_2": [block.norm_2.eps for block in self.blocks],
        }
        layers = pd.DataFrame(
            {"window": np.repeat(np.arange(batch), depth), "layer": np.tile(np.arange(depth), batch)}
            | dict(zip(statistics, columns))
            | {name: np.tile(column, batch) for name, column in constants.items()}
        )
        windows = dict(zip(window, values[per_block.numel() :].reshape(len(window), batch)))
        return layers, pd.DataFrame({"window": np.arange(batch)} | windows)

    @contextmanager
    def _observing(self, records: Records, inputs: list, windows: int) -> Iterator[None]:
        """Hooks on every site of every block, for one pass over ``windows`` windows."""
        with ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                for handle in self._attach(block, layer, records, windows):
                    stack.callback(handle.remove)
                stack.callback(observers.pop, block.attention, None)
                if self.power_iteration:

                    def keep(module, args, kwargs):
                        inputs.append((args, kwargs))

                    stack.callback(block.module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield

    def _attach(self, block: Block, layer: int, records: Records, windows: int) -> Iterator[RemovableHandle]:
        """Observe ``block``, giving its statistics to ``records``; yields the handles of the hooks."""
        paused, write, room = self.low.paused, partial(records.write, layer), partial(records.room, layer)
        observers[block.attention] = attention = AttentionStatistics(paused, block.score_scaling, room)

        def by_window(x: Tensor) -> Tensor:  # OPT's MLP sees the tokens of all windows in one row
            return x if x.ndim > 2 else x.unflatten(0, (windows, -1))

        def observe(module: nn.Module, measure: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> RemovableHandle:
            def hook(module, args, output):
                with paused():
                    write(**measure(by_window(args[0]), by_window(output)))

            return module.register_forward_hook(hook)

        def attention_site(context: Tensor, output: Tensor) -> dict[str, Tensor]:
            return attention.result() | {
                "context_norm": segment_norms(context),
                "attention_norm": segment_norms(output),
            }

        def mlp_site(activated: Tensor, output: Tensor) -> dict[str, Tensor]:
            return {"activation_norm": segment_norms(activated), "mlp_norm": segment_norms(output)}

        yield observe(block.norm_1.module, partial(norm_site, block.norm_1, "1"))
        yield observe(block.attention_out, attention_site)
        yield observe(block.norm_2.module, partial(norm_site, block.norm_2, "2"))
        yield observe(block.mlp_out, mlp_site)
        for heads, norm in block.head_norms.items():
            yield observe(norm.module, partial(head_norm_site, norm, heads))
        if block.up is not None:
            yield observe(block.activation, lambda _, output: {"activated_max": window_max(output)})
            yield observe(block.up.modules[0], lambda _, output: {"up_max": window_max(block.up.of(output))})


def norm_site(norm: Norm, site: str, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """What ``norm``, before sublayer ``site``, does to ``x`` (B, T, d_model); ``finished`` derives the moments."""
    path, mean, scale = normalization_path(norm, x)
    measured = {f"mean_{site}": mean, f"scale_{site}": scale, f"path_{site}_norm": segment_norms(path)}
    if site == "2":  # of norm_1's output, nothing in the score needs the norm
        measured["norm_2_norm"] = segment_norms(output)
    return measured


def head_norm_site(norm: Norm, heads: str, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The largest gain, max|gamma| / sqrt(min sigma^2 + epsilon), of a norm of query or key ``heads`` (B, T, H, d)."""
    _, _, scale = normalization_path(norm, x.flatten(1, -2))
    return {f"{heads}_gain": norm.gamma.abs().amax() * scale.amax(-1)}


def normalization_path(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Z, mean and 1 / sqrt(sigma^2 + epsilon) of ``x`` (B, T, d_model) (``reductions.layernorm_with_moments``)."""
    return (layernorm_with_moments if norm.centred else rmsnorm_with_moments)(x, norm.gamma, norm.eps)


def window_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats of each window, (B, T, vocabulary) -> (B,), in fp32."""
    predicted, expected = logits[:, :-1].float(), tokens[:, 1:]
    # With the vocabulary last: along any other axis the softmax is several times slower.
    losses = functional.cross_entropy(predicted.flatten(0, 1), expected.flatten(), reduction="none")
    return losses.view(expected.shape).mean(-1)
