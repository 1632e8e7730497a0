"""Mixes of GGUF types by name: which tensor of a model gets what, by the rules of llama-quantize.

Read in ``src/llama-quant.cpp`` of the llama.cpp in llama-cpp-python 0.3.36, for files made without an importance
matrix. Values and the second matrix of the MLP get more bits in some blocks, the head more than all others. A tensor
whose rows do not fit the blocks of its type falls back (``GgmlType.of_width``).
"""

import re
from collections.abc import Iterable
from typing import Any

from fragility_core.models.paths import block_of, head_paths
from fragility_quantization.ggml import MIXES

# The names of tensors in GGUF files, by the last parts of the paths of modules in transformers.
TENSORS = {
    "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_qkv": "qkv_proj c_attn query_key_value",
    "attn_output": "o_proj out_proj attn.c_proj self_attn.dense attention.dense", "ffn_gate": "gate_proj",
    "ffn_up": "up_proj gate_up_proj c_fc fc1 dense_h_to_4h", "ffn_down": "down_proj mlp.c_proj fc2 dense_4h_to_h",
}  # fmt: skip
SUFFIXES = {suffix: name for name, suffixes in TENSORS.items() for suffix in suffixes.split()}
ENDS = {"embed_tokens": "token_embd", "wte": "token_embd", "embed_in": "token_embd", "lm_head": "output"}
ENDS |= {"embed_out": "output", "wpe": "position_embd", "embed_positions": "position_embd"}


def tensor_name(path: str) -> str:
    """The name in GGUF files of the weight of the module at ``path``; raises ValueError for a module without one."""
    block = block_of(path)
    parts = (path if block is None else path.removeprefix(f"{block[0]}.")).split(".")
    if block is None and parts[-1] in ENDS:
        return f"{ENDS[parts[-1]]}.weight"
    experts = "experts" in parts
    shared = "_shexp" if any(part.startswith("shared_expert") for part in parts) else ""
    for suffix in (".".join(parts[-2:]), parts[-1]):
        if block is not None and suffix in SUFFIXES and not experts:
            return f"blk.{block[1]}.{SUFFIXES[suffix]}{shared}.weight"
    raise ValueError(
        f"a tensor of a GGUF file must have a name that is known here, got the module {path!r}: known are those that "
        f"end in {', '.join([*SUFFIXES, *ENDS])}, and no experts"
    )


def ends(model: Any) -> list[str]:
    """Paths of the embedding of tokens and of the head, those that ``model`` has."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return [path for path, module in model.named_modules() if module is embedding] + head_paths(model)


def tensor_names(model: Any, paths: Iterable[str]) -> dict[str, str]:
    """The names of tensors for the modules at ``paths``; a tied head has the name of the embedding."""
    named, first = {path: tensor_name(path) for path in paths}, dict[int, str]()
    return {path: first.setdefault(id(model.get_submodule(path).weight), name) for path, name in named.items()}


def more_bits(i: int, count: int) -> bool:
    """True for block ``i`` of ``count`` where mixes "m" spend more: in the first and last eighth, and every third."""
    return i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2


def types_of_mix(mix: str, model: Any, tensors: Iterable[str]) -> dict[str, str]:
    """The names of types, by the names of ``tensors``, that the ``mix`` gives a ``model``, before any falls back.

    Raises ValueError for Falcon, which has rules of its own.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type == "falcon":
        raise ValueError("mixes must have the rules of all models, but Falcon has rules of its own: take one type")
    base, names = MIXES[mix], set(tensors)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layers = config.num_hidden_layers
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    shared = heads // kv_heads
    known = shared, layers == 80 and is_70b(config.model_type, shared), experts
    numbers = {name: int(found[1]) for name in names if (found := re.match(r"blk\.(\d+)\.", name))}
    values = sorted((name for name in names if re.search(r"attn_(v|qkv)\.", name)), key=numbers.__getitem__)
    order = {name: i for i, name in enumerate(values)}
    chosen = {}
    for name in names:
        kind = re.sub(r"^blk\.\d+\.|\.weight$", "", name)
        if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in names):
            chosen[name] = "q8_0" if base == "q8_0" else "q6_k"
        elif kind in ("attn_v", "attn_qkv"):
            chosen[name] = of_values(mix, base, order[name], len(values), known)
        elif kind.startswith("ffn_down"):
            chosen[name] = of_down(mix, base, numbers[name], layers)
        elif kind == "attn_k" and experts == 8:
            chosen[name] = "q8_0"
        elif kind == "attn_output":
            chosen[name] = of_output(mix, base, experts)
        else:
            chosen[name] = base
    return chosen


def is_70b(kind: str, shared: int) -> bool:
    """True if llama.cpp calls a model of this ``kind`` with 80 blocks 70B: a Qwen2, or a Llama that has shared keys."""
    return kind == "qwen2" or (kind in ("llama", "mistral") and shared > 1)


def of_values(mix: str, base: str, i: int, count: int, known: tuple[int, bool, int]) -> str:
    """The type of value matrix ``i`` of ``count``; ``known`` are query heads a key, True for 70B, and experts."""
    shared, large, experts = known
    chosen = base
    match mix:
        case "q2_k":
            chosen = "q4_k" if shared >= 4 else "q3_k"
        case "q3_k_m":
            chosen = "q5_k" if i < 2 else "q4_k"
        case "q3_k_l":
            chosen = "q5_k"
        case "iq4_nl" if shared >= 4:
            chosen = "q5_k"
        case "q4_k_m" | "q5_k_m" if more_bits(i, count):
            chosen = "q6_k"
        case "q4_k_s" if i < 4:
            chosen = "q5_k"
    if large and chosen in ("q3_k", "q4_k"):
        chosen = "q5_k"  # values of a 70B model are an eighth of its queries
    return "q8_0" if experts == 8 else chosen


def of_down(mix: str, base: str, i: int, count: int) -> str:
    """The type of the second matrix of the MLP in block ``i`` of ``count``."""
    first = i < count // 8
    match mix:
        case "q2_k":
            return "q3_k"
        case "q3_k_m":
            return "q5_k" if i < count // 16 else "q4_k"
        case "q3_k_l":
            return "q5_k"
        case "q4_k_m" | "q5_k_m" if more_bits(i, count):
            return "q6_k"
        case "iq4_nl" | "q4_k_s" if first:
            return "q5_k"
    return base


def of_output(mix: str, base: str, experts: int) -> str:
    """The type of the matrix after attention."""
    if experts == 8:
        return "q5_k" if mix in ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m") else base
    return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mix, base)


def types_by_path(mix: str, model: Any, paths: Iterable[str]) -> dict[str, str]:
    """The type by path of the matrix of each layer at ``paths`` that a ``mix``, one of MIXES, gives ``model``."""
    names = tensor_names(model, paths)
    chosen = types_of_mix(mix, model, names.values())
    return {path: chosen[name] for path, name in names.items()}
