"""The needs of a diagnosis: the form that fits into memory, the time, the memory, and the reading from the disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fragility_core.models.paths import block_paths
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.timing import REPEATS, Timing, ends, seconds, timed
from fragility_lab.inputs.checkpoints import default_device
from fragility_lab.inputs.loading import Inputs
from fragility_lab.reporting.tables import duration, quantity
from fragility_lab.running.threads import on_free_cores
from fragility_numerics.internals import attention_of
from fragility_numerics.presence import loaded as read
from fragility_offload.memory import free_memory
from fragility_offload.offloaded import is_offloaded, parts
from fragility_quantization.recipes import get_recipe

ONCE = 9  # reads of a streamed model that do not depend on the windows: checks, timing, the forecast itself
BOTH_WAYS = 2  # reads of a pass forward and back
MEASURED = 4  # reads by measured passes: of two models, without and with a plan
LARGEST = 32  # windows that share a read
STACK = 2**23  # bytes of a thread; each of the windows that share a read has as many as torch computes with


@dataclass(frozen=True)
class Forecast:
    """The needs of a diagnosis: seconds, bytes of memory, and the bytes that are free (None if unknown).

    ``form`` says why a model is streamed and how much is read from the disk, or why it is spread over several GPUs. It
    is empty for a whole model on one device. ``batch`` windows share a read. For a whole model ``steps`` has the
    seconds of the steps of ``run.STEPS`` by name, and ``slopes`` the bytes that secant slopes take beside ``memory``.
    """

    seconds: float
    memory: int
    free: int | None
    form: str = ""
    batch: int = 1
    steps: Mapping[str, float] = field(default_factory=dict)
    slopes: int = 0

    def of(self, step: str) -> str:
        """The seconds of a ``step`` of the work, in words; empty if they are not known."""
        return f", about {duration(self.steps[step])}" if step in self.steps else ""

    @property
    def fits(self) -> bool:
        """True if the free memory suffices, or is not known."""
        return self.free is None or self.memory < self.free

    def __str__(self) -> str:
        free, takes = "" if self.free is None else f" ({quantity(self.free)} free)", quantity(self.memory + self.slopes)
        return f"about {duration(self.seconds)} and {takes} of additional memory{free}{self.form}"


@on_free_cores()
def forecast(request: Request, loaded: Inputs, tokens: Tensor) -> Forecast:
    """Forecast the needs of a diagnosis of ``tokens`` (B, T) from passes over one window and from the model's size.

    Seconds of a streamed model come from fp32 passes alone, and are good to a factor of two.
    """
    model, count = loaded.model, len(tokens)
    if not is_offloaded(model):
        return forecast_whole(request, loaded, tokens)
    plain = min(timed(model, tokens[:1], loaded.device) for _ in range(REPEATS))
    emulated = not request.rounds_weights_alone and loaded.execution(get_recipe(request.format).kernels) == "emulated"
    passes = 1 + 2 * (2 + 2 * emulated) + 4 + 4 * request.probes + 2 * emulated  # reference, two low, the estimate
    if request.mixes:
        passes += len(request.schemes) * 8 * (1 + request.probes)
    _, free = free_on_devices(model)
    start = seconds(loaded.device)
    for part in parts(model).values():
        with read(part):
            pass
    read_seconds = seconds(loaded.device) - start
    batch = batch_size(partial(streamed_memory, request, model), count, free)
    reads = ONCE + reads_a_batch(request, model) * -(-count // batch)
    why = (
        "it was asked for" if request.form == "streamed" else f"the whole form takes {quantity(whole(request, model))}"
    )
    shared = f", {batch} windows at a time" if batch > 1 else ""
    form = f"; streamed, as {why}: reads {reads} times {quantity(loaded.files)} from the disk{shared}"
    passes += 3 + 3 + 4 * request.probes  # an estimate runs forward twice, and one more says which errors act together
    computing = max(plain - read_seconds, 0) * passes * count
    takes = streamed_memory(request, model, batch)
    return Forecast(computing + read_seconds * reads, takes, free, form, batch)


def forecast_whole(request: Request, loaded: Inputs, tokens: Tensor) -> Forecast:
    """The forecast for a model that is in memory."""
    model, count = loaded.model, len(tokens)
    devices, free = free_on_devices(model)
    fits = free is None or memory(request, model) < free
    steps = Timing.of(request, loaded, tokens, fits).by_step(request, count)
    if not chooses_experts(model):
        del steps["experts"]
    takes = quantity(whole(request, model))
    spread = f"; spread over {len(devices)} GPUs, as the whole form takes {takes}, more than one has free"
    form = spread if len(devices) > 1 else ""
    slopes = of_secants(request, model) if request.reference != "no" and secants_fit(request, model) else 0
    return Forecast(sum(steps.values()), memory(request, model), free, form, steps=steps, slopes=slopes)


def free_on_devices(model: PreTrainedModel) -> tuple[set[torch.device], int | None]:
    """The devices of ``model``, and the bytes that are free on them; None if the system does not say."""
    devices = {p.device for p in model.parameters()}
    each = [free_memory(device) for device in devices]
    known = [free for free in each if free is not None]
    return devices, sum(known) if len(known) == len(each) else None


def stored_dtype(request: Request) -> torch.dtype:
    """The dtype of most parameters of the low-precision model."""
    return torch.float32 if request.rounds_weights_alone else get_recipe(request.format).kernels.compute_dtype


def activations(request: Request, model: PreTrainedModel) -> tuple[int, int]:
    """Bytes that the backward pass keeps of a window: of all blocks, and of the head."""
    config: Any = model.config.get_text_config()
    recipe = get_recipe(request.format)
    rounds_operands = recipe.linear.inputs is not None and not request.weights_only
    kept_a_token = kept_by_blocks(model, rounds_operands)
    if attention_of(model) == "eager":
        kept_a_token += 4 * 6 * getattr(config, "num_attention_heads", 0) * request.length * config.num_hidden_layers
    return request.length * kept_a_token, request.length * 6 * 4 * config.vocab_size


def memory(request: Request, model: PreTrainedModel) -> int:
    """Bytes beyond the fp32 model: two copies in the format, one in fp32, and those of ``activations``.

    A choice among schemes has another copy in fp32, of the scheme that is predicted.
    """
    parameters, wide = sum(p.numel() for p in model.parameters()), 4 * (1 + request.mixes)
    return parameters * (2 * stored_dtype(request).itemsize + wide) + sum(activations(request, model))


def whole(request: Request, model: PreTrainedModel) -> int:
    """Bytes that the whole form takes: ``memory``, the fp32 model and, if there is a reference model, the other one."""
    return memory(request, model) + 4 * (1 + bool(request.reference_model)) * sum(p.numel() for p in model.parameters())


def whole_fits(request: Request, model: PreTrainedModel) -> bool:
    """True if the whole form of ``model``, which may be on "meta", fits into the memory of the default device."""
    free = free_memory(torch.device(default_device()))
    return free is None or whole(request, model) < free


def of_secants(request: Request, model: PreTrainedModel) -> int:
    """Bytes that secant slopes take beside ``memory``.

    They keep three times what a backward pass keeps, the weights halfway, and up to 28 numbers an attention score.
    """
    config: Any = model.config.get_text_config()
    scores = getattr(config, "num_attention_heads", 0) * request.length**2 * config.num_hidden_layers
    weights = sum(p.numel() for p in model.parameters())
    return 2 * sum(activations(request, model)) + 4 * weights + 4 * 28 * scores


def secants_fit(request: Request, model: PreTrainedModel) -> bool:
    """True if secant slopes fit into what is free now."""
    free = free_memory(next(model.parameters()).device)
    return free is None or memory(request, model) + of_secants(request, model) < free


def fits_several_gpus(request: Request, model: PreTrainedModel) -> bool:
    """True if the whole form of ``model``, which may be on "meta", fits into the memory of several GPUs.

    Each GPU gets an equal share, and up to one part more, since parts are not divided.
    """
    count, takes = torch.cuda.device_count(), whole(request, model)
    if count < 2:
        return False
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts(model).values()]
    least = min(free_memory(torch.device("cuda", number)) or 0 for number in range(count))
    return takes / count + takes * max(sizes) / sum(sizes) < least


def streamed_memory(request: Request, model: PreTrainedModel, batch: int = 1) -> int:
    """Bytes that the streamed form takes: the passes of the largest part, and what enters each block.

    A part is held in fp32 twice (exact and as stored) and once in the format. The gradients of its largest matrix are
    formed for all probes, in two copies. In an estimate, each window of the ``batch`` keeps its stream, the output of
    the target with its signs and gradients, and gradients of tied matrices, which wait for the embedding. In a
    comparison it keeps two streams and their logits. All windows but one have threads of their own.
    """
    config: Any = model.config.get_text_config()
    blocks = block_paths(model)
    of_blocks, of_head = activations(request, model)

    def held(part: nn.Module) -> int:
        entries = [p.numel() for p in part.parameters()]
        return sum(entries) * (8 + stored_dtype(request).itemsize) + max(entries) * 4 * 2 * request.probes

    found = {path: held(part) for path, part in parts(model).items()}
    in_blocks = max(found[path] for path in blocks) + of_blocks // len(blocks)
    elsewhere = max((size for path, size in found.items() if path not in blocks), default=0) + of_head
    tied = getattr(config, "tie_word_embeddings", False)
    waiting = tied * 4 * request.probes * config.vocab_size * config.hidden_size
    stream, logits = (4 * request.length * size for size in (config.hidden_size * len(blocks), config.vocab_size))
    estimated = stream + (of_head + 2 * request.probes * logits + waiting if request.measured_in != "hidden" else 0)
    compared = 2 * (stream + logits)
    threads = (batch - 1) * STACK * torch.get_num_threads()
    return max(in_blocks, elsewhere) + batch * max(estimated, compared) + threads


def batch_size(takes: Callable[[int], int], count: int, free: int | None) -> int:
    """The number of windows, of ``count``, that run in a batch; ``takes`` gives a batch's bytes by its windows.

    All but the first may take half of the memory that it leaves ``free``.
    """
    one, two, three = map(takes, (1, 2, 3))
    beside = count if free is None else ((free - one) // 2 - (two - one)) // (three - two) + 1
    return max(1, min(count, LARGEST, 1 + beside))


def reads_a_batch(request: Request, model: PreTrainedModel) -> int:
    """The number of times that a streamed model is read for one batch of windows, if fp32 passes are measured.

    An estimate reads the model forward and backward at each end. One more estimate, at one end, finds the errors that
    act together. Choices of experts are compared in two passes.
    """
    estimates = len(request.schemes) if request.mixes else 1
    return BOTH_WAYS * (ends(request) * estimates + 1) + MEASURED + 2 * chooses_experts(model)


def chooses_experts(model: Any) -> bool:
    """True if ``model`` sets experts per token."""
    return getattr(model.config.get_text_config(), "num_experts_per_tok", None) is not None


def kept_by_blocks(model: PreTrainedModel, rounds_operands: bool = False) -> int:
    """Bytes per token that the backward pass keeps of all blocks: a rough estimate, rather too high.

    It counts 8 bytes per d_model entries of the matrices (11 if operands are rounded), and 100 bytes per entry of the
    stream (160 with experts). Of the experts only the share that a token meets counts. In eight families (with rounded
    operands in five), 0.5 to 1 times as many bytes were measured.
    """
    config: Any = model.config.get_text_config()
    chosen: Any = getattr(config, "num_experts_per_tok", None)
    matrices = [p for path in block_paths(model) for p in model.get_submodule(path).parameters() if p.ndim > 1]
    routed = chosen is not None and any(p.ndim == 3 for p in matrices)
    running: float = sum(p.numel() * min(1, chosen / len(p)) if routed and p.ndim == 3 else p.numel() for p in matrices)
    of_matrices = (11 if rounds_operands else 8) * running / config.hidden_size
    return int(of_matrices + (160 if routed else 100) * config.hidden_size * config.num_hidden_layers)
