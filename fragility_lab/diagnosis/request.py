"""What is asked for, checked before any work, and the time and memory that it will take."""

import argparse
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fragility_core.arithmetic.internals import attention_of
from fragility_core.arithmetic.recipes import GIVEN, RECIPES, Recipe, get_recipe
from fragility_core.models.tree import block_paths
from fragility_core.protection import KEEPABLE_SITES
from fragility_lab.diagnosis.given import load_rounded, require_same_architecture
from fragility_lab.diagnosis.measure import observe
from fragility_lab.inputs.checkpoints import EMBEDDED, shortened
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.loading import load as load_inputs
from fragility_lab.inputs.text import select_windows
from fragility_lab.reporting.tables import duration, quantity

ATTENTIONS = ("auto", "sdpa", "eager")
TARGETS = ("hidden", "kl", "logprob")
REFERENCES = ("auto", "yes", "no")
SWITCH = {"yes": True, "true": True, "no": False, "false": False}
BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
DIVERGENCE = re.compile(r"kl\s*(\d+(?:\.\d+)?(?:e-?\d+)?)", re.IGNORECASE)
UNITS = {"": "blocks", "block": "blocks", "site": "sites", "module": "modules", "byte": "bytes"}
BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}


@dataclass(frozen=True)
class Request:
    """A model and a text (hub name, path, or "embedded"), the name of a recipe as ``format``, and a budget.

    ``budget`` is "2 blocks", "1 site", "6 modules" or "40 MB" to keep in fp32; a bare number counts blocks. "5 bits" a
    weight, "KL 0.01" at most, or for a recipe with schemes for weights "12 MB" of the whole model, gives each linear
    layer one of the ``schemes``. Then ``keep`` names sites, such as "residual head", of which the plan may keep parts
    in fp32. ``target`` is what the error is measured in: "hidden", "kl" or "logprob" (``adjoint.targets``). ``seed``
    draws ``windows`` windows of ``length`` tokens. The prediction averages over ``probes`` sign vectors. ``attention``
    is the implementation that the model runs with. ``reference`` says whether fp32 passes are measured: "auto" measures
    them if memory allows. With ``weights_only`` only the weights are rounded, and computing is in fp32. The ``format``
    "given" compares the weights of ``model``, as they are, with those of the fp32 ``reference_model``. Raises
    ValueError for other values.
    """

    model: str
    data: str
    format: str
    budget: str
    windows: int
    length: int
    probes: int = 2
    seed: int = 0
    attention: str = "auto"
    reference: str = "auto"
    weights_only: bool = False
    target: str = "hidden"
    keep: str = ""
    reference_model: str = ""

    def __post_init__(self):
        if (self.format == GIVEN) != bool(self.reference_model):
            raise ValueError(
                f'a reference model goes with the format "{GIVEN}", which compares weights as they are, got '
                f"{self.format!r} and {self.reference_model!r}: leave RECIPE= or REFERENCE_MODEL= away"
            )
        if not (self.reference_model or get_recipe(self.format).rounds):
            rounding = ", ".join(name for name, recipe in RECIPES.items() if recipe.rounds)
            raise ValueError(f"a diagnosis needs a format that rounds results, {rounding}, got {self.format!r}")
        for name, known in (("attention", ATTENTIONS), ("reference", REFERENCES), ("target", TARGETS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, least in (("windows", 1), ("length", 2), ("probes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if strange := [site for site in self.kept if site not in KEEPABLE_SITES]:
            raise ValueError(f"keep must name some of {', '.join(KEEPABLE_SITES)}, got {', '.join(strange)}")
        if self.mixes:
            self.schemes  # noqa: B018  raises
        elif self.kept:
            raise ValueError(
                "keep goes with a budget for schemes (bits, KL, or MB with a recipe such as w4a16-g128); other budgets "
                f"choose among all parts: got KEEP={self.keep!r} with {self.budget!r}"
            )
        if self.reference_model and self.parsed_budget[1] == "bytes":
            raise ValueError(
                "a budget of bytes needs to know what weights take, but those of another's format do not say it, got "
                f"{self.budget!r}: count blocks, sites or modules"
            )

    @property
    def kept(self) -> list[str]:
        """The sites that a choice of schemes may keep in fp32."""
        return self.keep.replace(",", " ").split()

    @property
    def rounds_weights_alone(self) -> bool:
        """Whether computing is in fp32."""
        return self.weights_only or bool(self.reference_model)

    @property
    def described(self) -> str:
        """What is compared with fp32, in words."""
        if self.reference_model:
            return f"weights as they are, against those of {self.reference_model}"
        return f"weights in {self.format}" if self.weights_only else self.format

    @property
    def execution(self) -> str:
        """The argument ``execution`` of ``lowering.lower``."""
        return "weights" if self.weights_only else "auto"

    @property
    def mixes(self) -> bool:
        """Whether the budget is for a choice of schemes, not for what is kept in fp32."""
        unit = self.parsed_budget[1]
        return unit in ("bits", "kl") or (unit == "bytes" and get_recipe(self.format).linear.weights is not None)

    @property
    def measured_in(self) -> str:
        """The target; KL if the budget is one of KL."""
        return "kl" if self.parsed_budget[1] == "kl" else self.target

    @property
    def schemes(self) -> list[Recipe]:
        """The recipes among which a budget of bits chooses: ``format``, one of 8 bits, and the kernels' own format.

        Raises ValueError for a format without schemes for weights.
        """
        recipe = get_recipe(self.format)
        if recipe.linear.weights is None or recipe.cache is not None:
            raise ValueError(
                "a budget of bits, KL or MB divides the weights between schemes, so the recipe must name the smallest, "
                f"such as RECIPE=w4a16-g128, without a KV cache, got {self.format!r}"
            )
        names = [self.format.partition("@")[0]]
        if recipe.linear.weights.bits < 8:
            names.append("w8a16-g128" if recipe.linear.inputs is None else "fp8-dynamic")
        kernels = "fp32" if self.weights_only else recipe.kernels.name
        beside = [get_recipe(name if kernels == "bf16" else f"{name}@{kernels}") for name in names]
        return [*beside, get_recipe(kernels)]

    @property
    def parsed_budget(self) -> tuple[float, str]:
        """Number and unit: the arguments of ``Contributions.plan``, or a number of "bits" or of nats of "kl"."""
        if divergence := DIVERGENCE.fullmatch(self.budget.strip()):
            return float(divergence[1]), "kl"
        found = BUDGET.fullmatch(self.budget.strip())
        unit = found[2].lower() if found else "?"
        if unit.removesuffix("s") == "bit":
            return float(found[1]), "bits"
        if unit in BYTES:
            return int(float(found[1]) * BYTES[unit]), "bytes"
        if unit.removesuffix("s") not in UNITS or not float(found[1]).is_integer():
            raise ValueError(
                'a budget is a number of blocks, sites or modules, or of bytes ("2 blocks", "40 MB"), to keep in fp32, '
                f'or bits a weight or KL in nats ("5 bits", "KL 0.01"), got {shortened(self.budget)}'
            )
        return int(float(found[1])), UNITS[unit.removesuffix("s")]


def load(request: Request) -> tuple[Inputs, Tensor]:
    """The model with its head and the windows (B, T) on its device.

    With a reference model, ``Inputs.model`` is that one, and ``Inputs.rounded`` the other. Raises the errors of
    ``inputs.loading.load`` and of ``given``, and ValueError for a budget larger than the model or for an attention
    implementation that the model lacks.
    """
    name, given = request.reference_model or request.model, bool(request.reference_model)
    if given:
        require_same_architecture(request.model, name)
    loaded = load_inputs(
        name, request.data, [request.format], [request.length], request.windows, None, AutoModelForCausalLM
    )
    if given:
        loaded = replace(loaded, rounded=load_rounded(request.model, loaded.model))
        set_attention(loaded.rounded, request)
    (count, unit), modules = request.parsed_budget, [m.parameters(recurse=False) for m in loaded.model.modules()]
    owning = sum(next(parameters, None) is not None for parameters in modules)
    most = {"blocks": len(block_paths(loaded.model)), "sites": len(KEEPABLE_SITES), "modules": owning}.get(unit, count)
    if count > most:
        raise ValueError(f"the budget must be between 0 and the {most} {unit} of the model, got {count}")
    set_attention(loaded.model, request)
    require_causal(loaded.model, request.model)
    _, tokens = select_windows(loaded.stream, request.length, request.windows, request.seed)
    return loaded, tokens.to(loaded.device)


def set_attention(model: nn.Module, request: Request) -> None:
    """Set ``model`` to the attention of ``request``: for "auto" sdpa where the model has it, else its own.

    Raises ValueError for one that the model lacks.
    """
    asked = "sdpa" if request.attention == "auto" else request.attention
    try:
        model.set_attn_implementation(asked)
        if (runs := attention_of(model)) != asked:  # some only log that they refuse
            raise ValueError(f"it runs {runs}")
    except ValueError as cause:
        if request.attention != "auto":
            raise ValueError(
                f"{request.model!r} must have the attention that it is to run with, but has no {asked} attention: "
                "use ATTENTION=auto"
            ) from cause


@torch.no_grad()
def require_causal(model: nn.Module, name: str) -> None:
    """Raises ValueError unless the logits of ``model`` at a position are the same whatever follows it."""
    first, second = (torch.tensor([[1, 2, 3, last]], device=model.device) for last in (4, 5))
    a, b = (model(tokens, use_cache=False).logits[:, :-1] for tokens in (first, second))
    if not torch.allclose(a, b, rtol=1e-2, atol=1e-4 * float(a.abs().max())):
        raise ValueError(
            f"a diagnosis needs a model that predicts each token from those before it, got {name!r}, an encoder whose "
            "logits depend on later tokens"
        )


@dataclass(frozen=True)
class Forecast:
    """What a diagnosis will take: seconds, bytes of memory, and the bytes that are free (None if unknown)."""

    seconds: float
    memory: int
    free: int | None

    @property
    def fits(self) -> bool:
        """Whether the free memory suffices, as far as it is known."""
        return self.free is None or self.memory < self.free

    def __str__(self) -> str:
        free = "" if self.free is None else f" ({quantity(self.free)} free)"
        return f"about {duration(self.seconds)} and {quantity(self.memory)} of additional memory{free}"


def forecast(request: Request, loaded: Inputs, tokens: Tensor) -> Forecast:
    """An estimate from two timed fp32 passes of one window and from the model's size, good to a factor of two."""
    observe(loaded.model, tokens[:1])
    start = seconds(loaded.device)
    observe(loaded.model, tokens[:1])
    plain = seconds(loaded.device) - start
    emulated = not request.rounds_weights_alone and loaded.execution(request.format) == "emulated"
    passes = 1 + 2 * (2 + 2 * emulated) + 4 + 4 * request.probes + 2 * emulated  # reference, two low, the estimate
    if request.mixes:
        passes += len(request.schemes) * 8 * (1 + request.probes)
    return Forecast(plain * passes * len(tokens), memory(request, loaded), free_memory(loaded.device))


def seconds(device: torch.device) -> float:
    """The clock in seconds, after ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def memory(request: Request, loaded: Inputs) -> int:
    """Bytes beyond the fp32 model: two copies in the format, some in fp32, and what the backward pass keeps."""
    config, parameters = loaded.model.config.get_text_config(), sum(p.numel() for p in loaded.model.parameters())
    recipe = get_recipe(request.format)
    stored = torch.float32 if request.rounds_weights_alone else recipe.kernels.compute_dtype
    ends = 1 if request.measured_in == "hidden" else 2  # at which gradients are taken, each with copies in fp32
    copies = parameters * (2 * stored.itemsize + 4 * ends)
    rounds_operands = recipe.linear.inputs is not None and not request.weights_only
    kept_a_token = kept_by_blocks(loaded.model, rounds_operands) + 6 * 4 * config.vocab_size
    if attention_of(loaded.model) == "eager":
        kept_a_token += 4 * 6 * getattr(config, "num_attention_heads", 0) * request.length * config.num_hidden_layers
    return copies + request.length * kept_a_token


def kept_by_blocks(model: nn.Module, rounds_operands: bool = False) -> int:
    """Bytes per token that the backward pass keeps of all blocks: a rough estimate, rather too high.

    It counts 8 bytes per d_model entries of the matrices (11 if operands are rounded), where experts count as far as a
    token meets them, and 100 bytes per entry of the stream (160 with experts). In eight families (with rounded operands
    in five), 0.5 to 1 times as many bytes were measured.
    """
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    matrices = [p for path in block_paths(model) for p in model.get_submodule(path).parameters() if p.ndim > 1]
    routed = chosen is not None and any(p.ndim == 3 for p in matrices)
    running = sum(p.numel() * min(1, chosen / len(p)) if routed and p.ndim == 3 else p.numel() for p in matrices)
    of_matrices = (11 if rounds_operands else 8) * running / config.hidden_size
    return int(of_matrices + (160 if routed else 100) * config.hidden_size * config.num_hidden_layers)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on ``device``; None if the system does not say."""
    if device.type == "cuda":  # torch keeps what it freed
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    table = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.is_file() else None
    return int(found[1]) * 1024 if found else None


def typed(name: str, text: str) -> str | int | bool:
    """The value of the request's ``name`` that ``text`` stands for. Raises ValueError for text of another type."""
    if name == "weights_only":
        if text.lower() not in SWITCH:
            raise ValueError(f"weights_only must be one of {', '.join(SWITCH)}, got {shortened(text)}")
        return SWITCH[text.lower()]
    if name in ("windows", "length", "probes", "seed"):
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise ValueError(f"{name} must be a whole number, got {shortened(text)}")
        return int(text)
    return text


def main(arguments: list[str] | None = None) -> None:
    """Check what ``make diagnose`` was asked for, ``-p name=value`` each, before a notebook starts."""
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.diagnosis.request")
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE")
    given = dict(text.split("=", 1) for text in parser.parse_args(arguments).p)
    try:
        given = {name: typed(name, text) for name, text in given.items()}
        defaults = {"model": EMBEDDED, "data": "", "format": "bf16", "budget": "1 site", "windows": 1, "length": 2}
        request = Request(**defaults | given)
        if request.reference_model:
            require_same_architecture(request.model, request.reference_model)
    except (ValueError, OSError) as refused:
        sys.exit(f"make diagnose: {refused}")


if __name__ == "__main__":
    main()
