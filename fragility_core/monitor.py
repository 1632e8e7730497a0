"""One low-precision forward pass, and every statistic of the score measured on the way.

The model runs as transformers ships it: hooks see the sites of each block, the registered attention
function shows scores and probabilities. Statistics accumulate in fp32 on the device, one value per
window and block, and leave it once per batch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from fragility_core.architectures import Block, blocks
from fragility_core.attention import IMPLEMENTATION, observers
from fragility_core.emulation import LowPrecision
from fragility_core.reductions import (
    Reductions,
    sampled_rows,
    softmax_sensitivity_estimate,
    spectral_norm_from_gram,
)
from fragility_core.theory import mismatch
from fragility_core.transport import branch_jacobian_norm, weight_statistics


class AttentionStatistics:
    """Accumulates the statistics of one attention module over its blocks of query rows."""

    def __init__(self, reductions: Reductions, paused: Callable[[], AbstractContextManager]):
        self.reductions = reductions
        self.paused = paused

    def begin(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch, heads, rows, _ = query.shape
        reduce = self.reductions
        with self.paused():
            self.query_norm, self.key_norm = reduce.norm(query), reduce.norm(key)
            wide = reduce.widen(value)  # (B, H, T, d)
            self.value_norm = torch.linalg.vector_norm(wide.flatten(1), dim=-1)
            self.value_gram = wide.transpose(-1, -2) @ wide  # (B, H, d, d)
        self.score_norms: list[Tensor] = []
        self.probability_norms: list[Tensor] = []
        self.rows = sampled_rows(rows)
        self.sample = torch.zeros(batch, heads, len(self.rows), key.shape[2], device=query.device)

    def scores(self, scores: Tensor) -> None:
        with self.paused():
            self.score_norms.append(self.reductions.norm(scores))

    def probabilities(self, first_row: int, probabilities: Tensor) -> None:
        _, _, rows, seen = probabilities.shape
        inside = [i for i, row in enumerate(self.rows) if first_row <= row < first_row + rows]
        with self.paused():
            self.probability_norms.append(self.reductions.norm(probabilities))
            if inside:
                chosen = probabilities[:, :, [self.rows[i] - first_row for i in inside]]
                self.sample[:, :, inside[0] : inside[-1] + 1, :seen] = chosen

    def result(self) -> dict[str, Tensor]:
        """Statistics (B,) of the whole module; ``value_gram`` still (B, H, d, d)."""
        return {
            "query_norm": self.query_norm,
            "key_norm": self.key_norm,
            "value_norm": self.value_norm,
            "score_norm": torch.linalg.vector_norm(torch.stack(self.score_norms), dim=0),
            "probability_norm": torch.linalg.vector_norm(torch.stack(self.probability_norms), dim=0),
            "softmax_sensitivity": softmax_sensitivity_estimate(self.sample).amax((1, 2)),
            "value_gram": self.value_gram,
        }


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
    """Monitored low-precision passes of a Hugging Face model (protocol section 3).

    The model's weights may change between passes after ``refresh()``; LayerNorm's epsilon may change
    at any time.
    """

    def __init__(self, low: LowPrecision, power_iteration: bool = False):
        """``power_iteration`` also measures ||J_f||_2 of every block (app. estimation, option i).

        Raises TypeError for an architecture whose blocks are not known.
        """
        self.low = low
        self.model: PreTrainedModel = low.model
        self.blocks = blocks(self.model)
        self.power_iteration = power_iteration
        self.model.set_attn_implementation(IMPLEMENTATION)
        self.reductions = Reductions()
        self.refresh()

    def refresh(self) -> None:
        """Measure the statistics that belong to the weights again."""
        self.weights = pd.DataFrame([weight_statistics(block) for block in self.blocks])

    @torch.no_grad()
    def __call__(self, tokens: Tensor, reference: Tensor | None = None, loss: bool = False) -> Observation:
        """Monitor one pass over ``tokens`` (B, T).

        With ``reference``, the fp32 hidden states (B, T, d_model) of the same windows, the window rows
        hold the ``mismatch``; with ``loss`` (models with a head) the mean next-token cross entropy.
        Raises ValueError for a model in training mode.
        """
        if self.model.training:
            raise ValueError("a monitored pass needs the model in eval mode, got training mode: call model.eval()")
        records: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        inputs: list[tuple[tuple, dict]] = []
        with self._observing(records, inputs), self.low.running():
            hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
            logits = self.model.get_output_embeddings()(hidden) if loss else None
        grams = torch.stack([record.pop("value_gram") for record in records])  # (L, B, H, d, d)
        spectral = spectral_norm_from_gram(grams).amax(-1)  # (L, B)
        for i, record in enumerate(records):
            record["value_spectral_norm"] = spectral[i]
            if self.power_iteration:
                record["branch_jacobian_norm"] = branch_jacobian_norm(self.blocks[i].module, *inputs[i])
        window = {"final_norm": torch.linalg.vector_norm(hidden.float().flatten(1), dim=-1)}
        if reference is not None:
            window["mismatch"] = mismatch(hidden, reference)
        if logits is not None:
            window["loss"] = window_losses(logits, tokens)
        return Observation(*self._collect(records, window), hidden)

    def _collect(self, records, window) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Statistics as DataFrames, through a single transfer from the device."""
        names = list(records[0])
        block_values = torch.stack([torch.stack([record[name] for record in records]) for name in names])  # (S, L, B)
        window_values = torch.stack(list(window.values()))  # (W, B)
        values = torch.cat([block_values.flatten(), window_values.flatten()]).cpu().double().numpy()
        _, depth, batch = block_values.shape
        per_block = values[: block_values.numel()].reshape(len(names), depth, batch).transpose(2, 1, 0)
        layers = pd.DataFrame(per_block.reshape(batch * depth, len(names)), columns=names)
        layers.insert(0, "window", [w for w in range(batch) for _ in range(depth)])
        layers.insert(1, "layer", list(range(depth)) * batch)
        constants = self.weights.assign(
            epsilon_1=[block.norm_1.eps for block in self.blocks], epsilon_2=[block.norm_2.eps for block in self.blocks]
        )
        layers = layers.join(constants, on="layer")
        per_window = values[block_values.numel() :].reshape(len(window), batch)
        windows = pd.DataFrame(dict(zip(window, per_window)))
        windows.insert(0, "window", range(batch))
        return layers, windows

    @contextmanager
    def _observing(self, records: list[dict[str, Tensor]], inputs: list) -> Iterator[None]:
        """Hooks on every site of every block, for one pass."""
        with ExitStack() as stack:
            for block, record in zip(self.blocks, records):
                for handle in self._attach(block, record):
                    stack.callback(handle.remove)
                stack.callback(observers.pop, block.attention, None)
                if self.power_iteration:

                    def keep(module, args, kwargs):
                        inputs.append((args, kwargs))

                    stack.callback(block.module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            yield

    def _attach(self, block: Block, record: dict[str, Tensor]):
        """Observe ``block`` into ``record``; yields the handles of the hooks."""
        reduce, paused = self.reductions, self.low.paused
        observers[block.attention] = attention = AttentionStatistics(reduce, paused)

        def norm_site(site: str):
            def hook(module, args, output):
                with paused():
                    record[f"input_{site}_norm"], variance = reduce.moments(args[0])
                    record[f"variance_{site}"] = variance.mean(-1)
                    record[f"variance_{site}_min"] = variance.amin(-1)
                    norms = reduce.norm_and_centred(output, module.bias)
                    record[f"norm_{site}_norm"], record[f"path_{site}_norm"] = norms

            return hook

        def attention_site(module, args, output):
            with paused():
                record.update(attention.result())
                record["context_norm"] = reduce.norm(args[0])
                record["attention_norm"] = reduce.norm(output)

        def mlp_site(module, args, output):
            with paused():
                record["activation_norm"] = reduce.norm(args[0])
                record["mlp_norm"] = reduce.norm(output)

        yield block.norm_1.register_forward_hook(norm_site("1"))
        yield block.attention_out.register_forward_hook(attention_site)
        yield block.norm_2.register_forward_hook(norm_site("2"))
        yield block.mlp_out.register_forward_hook(mlp_site)


def window_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats of each window, (B, T, vocabulary) -> (B,), in fp32."""
    losses = functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none"
    )  # (B, T - 1)
    return losses.mean(-1)
