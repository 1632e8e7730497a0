"""What the packages need of the insides of torch and transformers: a file of each has it, and it is still there."""

import ast
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from fragility_adjoint import internals as beyond
from fragility_lab.paths import PROJECT
from fragility_numerics import internals, kernels
from fragility_numerics.attention import OBSERVED_EAGER, set_attention
from fragility_numerics.internals import PRIVATE, attention_of, private, restored_attention
from fragility_numerics.nested import map_tensors, tensors
from fragility_offload import internals as offloading

EVERY = PRIVATE | beyond.PRIVATE | offloading.PRIVATE
TABLES = {Path(file.__file__): file.PRIVATE for file in (internals, beyond, offloading)}
# Attributes that this project hides on tensors, and those that accelerate sets, which the packages do not need.
HIDDEN = {"_stored_as", "_is_stream", "_reference", "_read_as", "_source", "_hf_hook"}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}  # public, in spite of their names


def test_what_from_pretrained_keeps_in_fp32_depends_on_the_dtype():
    module = torch.nn.Module()
    assert internals.names_kept_in_fp32(module, torch.float16) == set()
    module._keep_in_fp32_modules, module._keep_in_fp32_modules_strict = ["wo"], ["norm"]
    assert internals.names_kept_in_fp32(module, torch.float16) == {"wo", "norm"}
    assert internals.names_kept_in_fp32(module, torch.bfloat16) == {"norm"}


@pytest.mark.parametrize("name", EVERY)
def test_a_private_name_is_still_there(name):
    """If this fails, the message says what the project needs the name for."""
    private(name, EVERY)


def test_few_private_names_of_torch_are_needed():
    """Before another one is added: is there a public way?"""
    assert sum(name.startswith("torch.") for name in EVERY) <= 14


def test_a_name_that_is_gone_is_reported_with_its_use(monkeypatch):
    for name in ("torch._C._no_such_thing", "torch.utils._no_such_module.thing", "transformers.PreTrainedModel._none"):
        monkeypatch.setitem(PRIVATE, name, "tests ask for it")
        with pytest.raises(
            ImportError, match=rf"needs {name} \(tests ask for it\), which \w+ [\d.+a-z]+ lacks: install"
        ):
            private(name)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, constants and the attributes of ``self``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_uses(tree: ast.AST) -> set[str]:
    """Private names that a file reads or sets on something else, imports, or names in a string for ``getattr``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            found |= {x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    return {name for name in found if is_private(name)}


PACKAGES = ("fragility_numerics", "fragility_core", "fragility_quantization", "fragility_offload", "fragility_adjoint")
FILES = [path for package in PACKAGES for path in (PROJECT / package).rglob("*.py")]
TREES = {path: ast.parse(path.read_text()) for path in sorted(FILES)}
OWN = set.union(*(own_names(tree) for path, tree in TREES.items() if path not in TABLES))


@pytest.mark.parametrize("path", [p for p in TREES if p not in TABLES], ids=lambda p: str(p.relative_to(PROJECT)))
def test_no_other_file_uses_private_names(path):
    foreign = private_uses(TREES[path]) - OWN - HIDDEN
    assert not foreign, f"{path.name} uses {sorted(foreign)}: add it to internals.py of its package"


@pytest.mark.parametrize("path", TABLES, ids=lambda p: str(p.relative_to(PROJECT)))
def test_the_table_holds_what_its_file_uses(path):
    in_table = {part for name in TABLES[path] for part in name.split(".")}
    assert private_uses(TREES[path]) - own_names(TREES[path]) <= in_table | HIDDEN


def test_private_uses_are_found():
    code = "import torch._C\nfrom torch._x import y\nx._version\ngetattr(x, '_base')\nself._mine = 1\nself._mine"
    assert private_uses(ast.parse(code)) == {"_C", "_x", "_version", "_base", "_mine"}
    assert own_names(ast.parse(code)) == {"_mine"}


@pytest.mark.parametrize("table", ["EXACT_FUNCTIONS", "FILLING", "PRODUCTS", "FACTORS", "SOFTMAXES"])
def test_kernels_and_functions_of_the_table_exist(table):
    newer = {"_grouped_mm"}  # since torch 2.7
    places = (torch, Tensor, functional, torch.ops.aten)
    missing = {
        name for name in [*getattr(kernels, table), kernels.CAST] if not any(hasattr(place, name) for place in places)
    }
    assert missing <= newer


def test_attention_is_restored(tiny_gpt2):
    """Also after an error, and for configurations that differ inside one model."""
    other = type(tiny_gpt2.config)()
    tiny_gpt2.inside = type(tiny_gpt2.base_model)(other)
    other._attn_implementation = "eager"
    with pytest.raises(KeyError):
        use_observed_attention(tiny_gpt2)
    assert attention_of(tiny_gpt2) == "sdpa" and attention_of(tiny_gpt2.inside) == "eager"
    assert attention_of(torch.nn.Linear(1, 1)) is None


def use_observed_attention(model):
    with restored_attention(model):
        set_attention(model, OBSERVED_EAGER)
        assert attention_of(model) == attention_of(model.inside) == OBSERVED_EAGER
        with restored_attention(model):
            set_attention(model, "eager")
            assert attention_of(model) == "eager"
        assert attention_of(model) == OBSERVED_EAGER
        raise KeyError


# --- Nested tensors ------------------------------------------------------------------------------


class Held(NamedTuple):
    first: Tensor
    rest: list


def test_tensors_are_found_and_changed_in_every_nest():
    one, two, three, four = (torch.full((2,), float(i)) for i in range(1, 5))
    cache = DynamicCache()
    output = BaseModelOutputWithPast(last_hidden_state=one, past_key_values=cache, hidden_states=(two, three))
    found = torch.ones(2, 2).max(0)  # a named tuple of torch's own
    value = {
        "pair": Held(one, [two, "text", None]),
        "ordered": OrderedDict(a=three),
        "output": output,
        "found": found,
    }
    assert [x.tolist() for x in tensors(value)][:7] == [[i, i] for i in (1, 2, 3, 1, 2, 3, 1)]
    doubled = map_tensors((value, 4.0, four), lambda x: x * 2)
    assert type(doubled) is tuple and doubled[1] == 4.0 and torch.equal(doubled[2], 2 * four)
    assert type(doubled[0]["pair"]) is Held and doubled[0]["pair"].rest[1:] == ["text", None]
    assert torch.equal(doubled[0]["pair"].first, 2 * one) and type(doubled[0]["ordered"]) is OrderedDict
    assert type(doubled[0]["output"]) is BaseModelOutputWithPast and doubled[0]["output"].past_key_values is cache
    assert torch.equal(doubled[0]["output"].hidden_states[1], 2 * three)
    assert torch.equal(doubled[0]["found"].values, torch.full((2,), 2.0))
