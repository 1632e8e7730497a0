"""Blocks of a Hugging Face model, with the sites of the paper's decomposition.

Nothing here knows a family by name. One token goes through the model, and ``one_token_pass`` records what each module
reads and returns. Which module reads the result of which other tells norms, projections and the MLP's layers apart. The
residual sums are then checked by value: a block that adds something else is refused, not scored wrongly.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fragility_core.models.norms import Norm, known_norm
from fragility_core.models.paths import attention_modules, block_paths, evaluating, is_linear
from fragility_numerics.lowering import base_of
from fragility_numerics.nested import entering
from fragility_numerics.presence import loaded


class ModuleCall(NamedTuple):
    """One call of a module: the hidden state that it read, and the one that it returned."""

    input: Tensor
    output: Tensor


class Projection(NamedTuple):
    """Linear layers that read one input, taken together; or some output ``features`` of one layer."""

    modules: tuple[Any, ...]  # of ``nn.Module``
    features: slice | Tensor = slice(None)

    @property
    def weight(self) -> Tensor:
        """The weight matrix, (out, in) of ``nn.Linear`` or (in, out) of ``Conv1D``."""
        axis = 1 if isinstance(self.modules[0], Conv1D) else 0
        weights = [module.weight.detach() for module in self.modules]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights, axis)
        return whole[:, self.features] if axis else whole[self.features]

    def of(self, output: Tensor) -> Tensor:
        """The projection's part of the ``output`` (..., out) of its module."""
        return output[..., self.features]


@dataclass(frozen=True)
class Block:
    """One residual block with norms inside its branches, its sublayers in sequence or in parallel.

    In sequence: h -> r = h + attention(norm_1(h)) -> r + mlp(norm_2(r)). In parallel: h -> h + attention(norm_1(h)) +
    mlp(norm_2(h)), where ``norm_2`` may be ``norm_1`` itself. ``mlp_in`` holds all linear layers that read the output
    of norm_2: in a gated MLP, activation(gate) * up, those of gate and up. Where there is an ``out_norm_1`` or
    ``out_norm_2``, a branch adds that norm of its result (Gemma 2 and 3). Such a block in sequence may lack norm_1 and
    norm_2, which are None then (OLMo 2).
    """

    module: nn.Module
    norm_1: Norm | None
    attention: nn.Module
    query: Projection
    key: Projection
    value: Projection
    head_width: int
    score_scaling: float  # scores are Q K^T times this
    head_norms: dict[str, Norm]  # norms of "query" and "key" heads; empty where there are none
    attention_out: nn.Module
    norm_2: Norm | None
    mlp_in: Projection
    activation: nn.Module
    up: Projection | None  # what the activation is multiplied by in a gated MLP
    mlp_out: nn.Module
    parallel: bool
    out_norm_1: Norm | None = None
    out_norm_2: Norm | None = None

    @property
    def shares_norm(self) -> bool:
        """True if one norm stands before both sublayers."""
        one, two = self.norm_1, self.norm_2
        return one is not None and two is not None and one.module is two.module

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms that the block has, by site: "1" and "2" before attention and MLP, "1_out" and "2_out" behind."""
        sites = {"1": self.norm_1, "2": self.norm_2, "1_out": self.out_norm_1, "2_out": self.out_norm_2}
        return {site: norm for site, norm in sites.items() if norm is not None}

    @property
    def width(self) -> int:
        """d_model."""
        return next(iter(self.norms.values())).gamma.numel()


def blocks(model: PreTrainedModel) -> list[Block]:
    """The residual blocks of a decoder, with or without a head, found by one pass over one token.

    A block has a LayerNorm or RMSNorm before each sublayer, behind it, or both. Its attention goes through
    transformers' attention interface and has one output projection; queries may be grouped, position embeddings are of
    any kind. Its MLP is of linear layers, gated or not. GPT-2, OPT, GPT-NeoX, Phi, Llama, Mistral, Qwen, Gemma and
    OLMo 2 have such blocks.
    Raises TypeError for another architecture, naming what it lacks (norms of the residual stream itself, mixtures of
    experts, cross-attention), for blocks of which some have other norms, and for a model of which parts are in fp32.
    """
    base: Any = base_of(model)
    dtypes = sorted({str(p.dtype) for p in base.parameters() if p.is_floating_point()})
    if len(dtypes) > 1:
        raise TypeError(
            f"the score has one unit roundoff for all of a model, got parameters in {' and '.join(dtypes)}: "
            "measure a protected model by its mismatch"
        )
    config = base.config.get_text_config()
    for setting in ("add_cross_attention", "is_encoder_decoder"):
        if getattr(config, setting, False):
            raise TypeError(f"the monitor needs a decoder without cross-attention, got a model with {setting}=True")
    if not base.is_backend_compatible():
        raise TypeError(
            f"the monitor sees scores through transformers' attention interface, got {type(base).__name__}, "
            "which computes its scores itself: predict its mismatch with fragility_adjoint"
        )
    found = [base.get_submodule(path) for path in block_paths(base)]
    _require_attention(base, [module for module in found if attention_modules(module)])
    calls = one_token_pass(base, found)
    ran = [module for module in found if module in calls[module]]  # not the blocks of a vision tower
    _require_attention(base, ran)
    read = [_Reading(module, calls[module], config.num_attention_heads).block() for module in ran]
    if len(kinds := {tuple(block.norms) for block in read}) > 1:
        raise TypeError(f"the score needs the same norms in all blocks of {type(base).__name__}, got {sorted(kinds)}")
    return read


def _require_attention(base: nn.Module, found: list[nn.Module]) -> None:
    """Raises TypeError unless blocks were ``found`` and each has one attention."""
    if not found or any(len(attention_modules(module)) != 1 for module in found):
        raise TypeError(
            f"the score does not cover {type(base).__name__}: it needs blocks with one attention module (attribute "
            "is_causal) each"
        )


class _Reading:
    """Finds the parts of one block among the ``calls`` of its modules."""

    def __init__(self, module: nn.Module, calls: dict[nn.Module, ModuleCall], heads: int):
        self.module, self.calls, self.heads = module, calls, heads
        self.attention = attention_modules(module)[0]
        with loaded(module):
            self.norms = {m: norm for m in calls if (norm := known_norm(m)) is not None}
        attending = set(self.attention.modules())
        self.inside, self.outside = [m for m in calls if m in attending], [m for m in calls if m not in attending]
        self.projections, self.mlp = ([m for m in part if is_linear(m)] for part in (self.inside, self.outside))
        own = {name for m in (*self.projections, *self.mlp) for name, _ in m.named_parameters(recurse=False)}
        more = sorted(own - {"weight", "bias"})
        self.require(not more, f"linear layers of a weight and a bias alone, got also {more}")

    def require(self, found: object, sought: str) -> None:
        if not found:
            modules = ", ".join(
                f"{name} ({type(m).__name__})" for name, m in self.module.named_modules() if m in self.calls and name
            )
            raise TypeError(
                f"the score does not cover {type(self.module).__name__}: it needs {sought}, which is not "
                f"among the modules that ran: {modules}"
            )

    def block(self) -> Block:
        outs = [self.norm_behind(linears[-1:]) for linears in (self.projections, self.mlp)]
        norm_1, norm_2 = self.norm_before_attention(outs[0]), self.norm_before_mlp(outs[1])
        parallel = self.is_parallel(norm_2, *outs)
        heads = self.heads_projections()
        *mlp_in, mlp_out = self.mlp
        activation, up = self.activation_and_up()
        return Block(
            module=self.module, norm_1=norm_1, attention=self.attention, **heads,
            score_scaling=getattr(self.attention, "scaling", heads["head_width"] ** -0.5),
            head_norms=self.head_norms(), attention_out=self.projections[-1],
            norm_2=norm_2, mlp_in=Projection(tuple(mlp_in)), activation=activation, up=up, mlp_out=mlp_out,
            parallel=parallel, out_norm_1=outs[0], out_norm_2=outs[1],
        )  # fmt: skip

    def norm_behind(self, outs: list[nn.Module]) -> Norm | None:
        """The norm of what the projection in ``outs`` returns, if there is one."""
        return next((n for m, n in self.norms.items() for out in outs if self.feeds(out, [m])), None)

    def norm_before_attention(self, out_norm: Norm | None) -> Norm | None:
        h, *linears = self.calls[self.module].input, *self.projections[:-1]
        found = [n for m, n in self.norms.items() if reads(self.calls[m], h) and self.feeds(m, linears)]
        if not found and out_norm and all(reads(self.calls[m], h) for m in linears):
            return None
        self.require(found, "a LayerNorm or RMSNorm between the block's input and the attention's projections")
        return found[0]

    def norm_before_mlp(self, out_norm: Norm | None) -> Norm | None:
        found = [n for m, n in self.norms.items() if self.feeds(m, self.mlp[:-1])]
        if not found and out_norm:
            return None
        self.require(found, "a LayerNorm or RMSNorm before the linear layers of an MLP")
        return found[0]

    def feeds(self, module: nn.Module, readers: list[nn.Module]) -> bool:
        """True if there are ``readers``, and all of them read what ``module`` returned."""
        return bool(readers) and all(reads(self.calls[m], self.calls[module].output) for m in readers)

    def is_parallel(self, norm_2: Norm | None, *out_norms: Norm | None) -> bool:
        """True if the MLP reads the block's input. Raises TypeError unless the residual sums are those of a block."""
        h, output = self.calls[self.module].input, self.calls[self.module].output
        ends = [norm.module if norm else out for norm, out in zip(out_norms, (self.projections[-1], self.mlp[-1]))]
        a, m = (self.calls[end].output for end in ends)
        second = self.calls[norm_2.module if norm_2 else self.mlp[0]]
        parallel = norm_2 is not None and reads(second, h)
        self.require(
            parallel or agree(second.input, h, a),
            "a second norm that reads h + attention(norm(h)) or, in a parallel block, h",
        )
        self.require(agree(output, h, a, m), "an output h + attention(norm(h)) + mlp(norm(...)), h the input")
        return parallel

    def heads_projections(self) -> dict[str, Any]:
        """Query, key and value projections and the width of a head.

        A softmax over one token is 1, so the context is the value. It tells how a projection to all three is laid out,
        unless the scores overflow.
        """
        *linears, out = self.projections
        context = self.calls[out].input.flatten()
        width = context.numel() // self.heads
        layouts = []
        if len(linears) == 3:
            layouts = [tuple(Projection((m,)) for m in linears)]
        elif len(linears) == 1:
            layouts = [
                tuple(Projection((linears[0],), rows) for rows in layout)
                for layout in fused_layouts(self.calls[linears[0]].output.shape[-1], self.heads, width)
            ]
        largest = max((self.calls[m].output.abs().max().item() for m in linears), default=0.0)
        overflowing = not largest**2 * width < torch.finfo(context.dtype).max  # NaN included

        def gives_context(value: Projection) -> bool:
            values = value.of(self.calls[value.modules[0]].output).view(-1, width)  # (H_kv, width)
            return agree(context, values.repeat_interleave(self.heads // len(values), 0))

        fitting = [layout for layout in layouts if overflowing or gives_context(layout[2])]
        self.require(fitting, "projections to queries, keys and values, each by itself or all in one")
        return dict(zip(("query", "key", "value"), fitting[0])) | {"head_width": width}

    def head_norms(self) -> dict[str, Norm]:
        """Norms of query and key heads inside the attention; queries' are taken to run first."""
        others = [m for m in self.inside if list(m.parameters(recurse=False)) and m not in self.projections]
        self.require(
            len(others) in (0, 2) and all(m in self.norms for m in others),
            "an attention of projections alone, or with one norm of queries and one of keys",
        )
        return dict(zip(("query", "key"), (self.norms[m] for m in others)))

    def activation_and_up(self) -> tuple[nn.Module, Projection | None]:
        """The MLP's activation, and in a gated MLP the projection that it is multiplied by."""
        *ins, out = self.mlp
        found = [
            m for m in self.outside
            if not list(m.parameters()) and any(reads(self.calls[m], self.calls[i].output) for i in ins)
        ]  # fmt: skip
        self.require(found and len(ins) < 3, "an activation between the linear layers of one MLP, and no router")
        activated = self.calls[found[0]].output
        if len(ins) == 1 and reads(self.calls[out], activated):
            return found[0], None
        halves = [Projection((m,)) for m in ins]
        if len(ins) == 1:  # a projection to gate and up
            features = self.calls[ins[0]].output.shape[-1]
            ends = slice(features // 2, features), slice(0, features // 2)
            halves = [Projection((ins[0],), part) for part in ends]
        parts = [(p, p.of(self.calls[p.modules[0]].output)) for p in halves]  # a router's result has another shape
        ups = [p for p, y in parts if y.shape == activated.shape and agree(self.calls[out].input, activated * y)]
        self.require(ups, "an MLP out(activation(in)) or out(activation(gate) * up)")
        return found[0], ups[0]


def fused_layouts(features: int, heads: int, width: int) -> list[tuple[Any, ...]]:
    """Places of queries, keys and values in a projection to all three: side by side, or head by head."""
    queries = heads * width
    keys = (features - queries) // 2
    if keys <= 0 or keys % width:
        return []
    layouts = [(slice(0, queries), slice(queries, queries + keys), slice(queries + keys, features))]
    if features == 3 * queries:
        layouts.append(tuple(torch.arange(features).view(heads, 3, width).transpose(0, 1).flatten(1)))
    return layouts


def _tensor(value: object) -> Tensor | None:
    """``value`` or the first tensor of nested tuples; None where that is no tensor."""
    while isinstance(value, tuple) and value:
        value = value[0]
    return value if torch.is_tensor(value) else None


@torch.no_grad()
def one_token_pass(base: Any, found: list[nn.Module]) -> dict[nn.Module, dict[nn.Module, ModuleCall]]:
    """For each block of ``found`` the calls of its modules, in the order in which they returned.

    The token is a random vector, since an embedding may be zero. A single token attends to itself alone.
    """
    calls: dict[nn.Module, dict[nn.Module, ModuleCall]] = {block: {} for block in found}
    with ExitStack() as stack:
        for block in found:
            stack.callback(block.register_forward_pre_hook(entering, with_kwargs=True).remove)

            def record(module: nn.Module, args: Any, kwargs: Any, output: object, own: Any = calls[block]) -> None:
                read, returned = _tensor(args or kwargs.get("hidden_states")), _tensor(output)
                if read is not None and returned is not None:
                    own[module] = ModuleCall(read, returned)

            for module in block.modules():
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        stack.enter_context(evaluating(base))  # with dropout, sums would not add up
        table = base.get_input_embeddings().weight
        token = torch.randn(1, 1, table.shape[-1], generator=torch.Generator().manual_seed(0))
        try:
            base(inputs_embeds=token.to(table), use_cache=False)
        except (RuntimeError, ValueError) as cause:  # Gemma 4 looks up more by the tokens themselves
            raise TypeError(f"the score needs a pass over embeddings, which {type(base).__name__} lacks") from cause
    return calls


def reads(call: ModuleCall, tensor: Tensor) -> bool:
    """True if ``call`` read ``tensor`` or a view of it. Equal values in other memory do not count."""
    return call.input.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def agree(x: Tensor, *parts: Tensor) -> bool:
    """True if ``x`` is the sum of ``parts`` up to roundings in its dtype. Entries that overflowed are left out."""
    x, flat = x.flatten(), [part.flatten() for part in parts]
    if any(part.shape != x.shape for part in flat):
        return False
    fine = torch.finfo(x.dtype)
    zero = torch.zeros((), device=x.device)
    allowed = 2 * fine.eps * sum((part.float().abs() for part in flat), zero) + fine.tiny
    apart = (x.float() - sum((part.float() for part in flat), zero)).abs()
    return bool(((apart <= allowed) | ~(apart.isfinite() & allowed.isfinite())).all())
