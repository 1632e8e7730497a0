"""Observed attention against the library's eager attention."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import eager_attention_forward

from fragility_numerics import attention
from fragility_numerics.attention import OBSERVED_EAGER, observed_attention, observers, row_blocks, set_attention
from fragility_numerics.emulation import Emulation
from fragility_numerics.formats import get_format

DTYPES = [torch.float32, torch.bfloat16]
# (query heads, key heads, queries, keys): plain, grouped queries, cached keys, one query, one of everything.
SHAPES = [(4, 4, 24, 24), (4, 2, 24, 24), (4, 1, 7, 7), (2, 2, 5, 24), (4, 2, 1, 24), (1, 1, 1, 1)]
HEAD_WIDTH, BATCH = 8, 3
whole_and_blocked = pytest.mark.parametrize("block_elements", [1, 200, 2**20])


class Module(nn.Module):
    """The attributes of an attention module that the library's functions read."""

    def __init__(self, groups: int = 1, is_causal: bool = True):
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


class Recorder:
    """An observer that keeps what it sees."""

    def __init__(self):
        self.seen_scores, self.seen_probabilities, self.first_rows = [], [], []

    def begin(self, query, key, value, scaling):
        self.query, self.key, self.value, self.scaling = query, key, value, scaling

    def scores(self, scores):
        self.seen_scores.append(scores.clone())

    def probabilities(self, first_row, probabilities):
        self.first_rows.append(first_row)
        self.seen_probabilities.append(probabilities.clone())

    def assembled(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """The blocks as one (B, H, T, T_kv) tensor, zero where a block ends before the last key."""
        keys = self.key.shape[2]
        return torch.cat([nn.functional.pad(block, (0, keys - block.shape[-1])) for block in blocks], 2)


@pytest.fixture
def attending(monkeypatch):
    """A function of (shape, dtype, block_elements) that makes inputs, a module and its observer."""

    def make(shape, dtype=torch.float32, block_elements=2**20, is_causal=True):
        monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block_elements)
        heads, key_heads, rows, keys = shape
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            2 * torch.randn(BATCH, h, n, HEAD_WIDTH, generator=generator)
            for h, n in ((heads, rows), (key_heads, keys), (key_heads, keys))
        )
        module, recorder = Module(heads // key_heads, is_causal), Recorder()
        observers[module] = recorder
        return SimpleNamespace(
            module=module, recorder=recorder, inputs=[x.to(dtype) for x in (query, key, value)], shape=shape
        )

    return make


def visible(rows: int, keys: int) -> torch.Tensor:
    """Which keys each of the last ``rows`` of ``keys`` positions may see, (rows, keys)."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def library(case, seen: torch.Tensor):
    """The library's eager attention, with the additive mask that it expects."""
    query = case.inputs[0]
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, torch.finfo(query.dtype).min)
    output, probabilities = eager_attention_forward(case.module, *case.inputs, mask, scaling=HEAD_WIDTH**-0.5)
    return output, probabilities


def assert_agree(got: torch.Tensor, want: torch.Tensor):
    """fp32 agrees to 1e-6 of the largest value; in bf16 at most 1 % of the entries are one spacing off.

    Kernels may sum the products of a block of rows in another order than those of all rows.
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
        return
    assert (got != want).float().mean() <= 0.01
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-7 * want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@whole_and_blocked
def test_causal_attention_is_the_librarys(shape, dtype, block_elements, attending):
    case = attending(shape, dtype, block_elements)
    output, none = observed_attention(case.module, *case.inputs, None, scaling=HEAD_WIDTH**-0.5)
    want, probabilities = library(case, visible(*shape[2:]))
    assert none is None
    assert_agree(output, want)
    assert_agree(case.recorder.assembled(case.recorder.seen_probabilities), probabilities)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@whole_and_blocked
def test_masked_attention_is_the_librarys(shape, dtype, block_elements, attending):
    """Causal and left-padded, as sdpa_mask builds masks; the padding differs between windows."""
    case = attending(shape, dtype, block_elements)
    rows, keys = shape[2:]
    seen = visible(rows, keys).expand(BATCH, 1, -1, -1).clone()
    seen[1, ..., : keys // 3] = False
    seen[1, ..., -1] = True  # every row sees a key
    output, _ = observed_attention(case.module, *case.inputs, seen)
    want, probabilities = library(case, seen)
    assert_agree(output, want)
    assert_agree(case.recorder.assembled(case.recorder.seen_probabilities), probabilities)
    hidden = case.recorder.assembled(case.recorder.seen_scores)[~seen.expand(BATCH, shape[0], rows, keys)]
    assert (hidden == 0).all()


def test_a_module_that_is_not_causal_sees_every_key(attending):
    case = attending((4, 4, 24, 24), is_causal=False)
    output, _ = observed_attention(case.module, *case.inputs, None)
    assert_agree(output, library(case, torch.ones(24, 24, dtype=torch.bool))[0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@whole_and_blocked
def test_what_the_observer_sees(shape, block_elements, attending):
    case = attending(shape, torch.float32, block_elements)
    observed_attention(case.module, *case.inputs, None, scaling=0.5)
    recorder, (query, key, value) = case.recorder, case.inputs
    groups = shape[0] // shape[1]
    assert torch.equal(recorder.query, query) and recorder.scaling == 0.5
    assert torch.equal(recorder.key, key.repeat_interleave(groups, 1))
    assert torch.equal(recorder.value, value.repeat_interleave(groups, 1))
    seen = visible(*shape[2:])
    exact = (query.double() @ recorder.key.double().mT * 0.5).masked_fill(~seen, 0)
    scores = recorder.assembled(recorder.seen_scores)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    assert (scores[..., ~seen] == 0).all()
    probabilities = recorder.assembled(recorder.seen_probabilities)
    assert (probabilities[..., ~seen] == 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(BATCH, shape[0], shape[2]))
    starts = [0, *torch.tensor([block.shape[2] for block in recorder.seen_probabilities]).cumsum(0).tolist()]
    assert recorder.first_rows == starts[:-1] and starts[-1] == shape[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_observing_changes_nothing(dtype, attending):
    case = attending((4, 2, 24, 24), dtype)
    observed, _ = observed_attention(case.module, *case.inputs, None)
    assert torch.equal(observed_attention(Module(2), *case.inputs, None)[0], observed)


def test_scaling_defaults_to_the_head_width(attending):
    case = attending((4, 4, 8, 8))
    default, _ = observed_attention(case.module, *case.inputs, None)
    assert case.recorder.scaling == HEAD_WIDTH**-0.5
    assert torch.equal(observed_attention(case.module, *case.inputs, None, scaling=HEAD_WIDTH**-0.5)[0], default)


def test_attention_dropout_is_refused(attending):
    case = attending((1, 1, 4, 4))
    with pytest.raises(ValueError, match="observed attention needs eval mode, got attention dropout 0.1: call"):
        observed_attention(case.module, *case.inputs, None, dropout=0.1)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias", "head_mask"])
def test_attention_of_other_scores_is_refused(option, attending):
    case = attending((1, 1, 4, 4))
    with pytest.raises(ValueError, match=f"softmax of scaled products, got a model that passes {option}"):
        observed_attention(case.module, *case.inputs, None, **{option: 50.0})
    observed_attention(case.module, *case.inputs, None, **{option: None})


def test_an_additive_mask_is_refused(attending):
    case = attending((1, 1, 4, 4))
    with pytest.raises(ValueError, match="True where a key may be seen, got one of torch.float32"):
        observed_attention(case.module, *case.inputs, torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("rows", "per_row", "block_elements", "want"),
    [
        (10, 4, 16, [(0, 4), (4, 8), (8, 10)]),
        (10, 5, 16, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]),  # 3 rows fit: the power of two below
        (3, 100, 16, [(0, 1), (1, 2), (2, 3)]),  # no row fits: one at a time
        (3, 1, 1000, [(0, 3)]),
    ],
)
def test_row_blocks(rows, per_row, block_elements, want, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block_elements)
    assert list(row_blocks(rows, per_row, torch.device("cpu"))) == want
    assert list(row_blocks(rows, per_row, torch.device("cuda"))) == [(0, rows)]


class LargestOutput(TorchDispatchMode):
    """Records the most elements that any kernel's result has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = result if isinstance(result, (tuple, list)) else [result]
            self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, torch.Tensor))])
        return result


@pytest.mark.parametrize("groups", [1, 2])
def test_no_tensor_of_all_scores_is_formed(groups, attending):
    length, heads, block_elements = 512, 2, 2**14
    case = attending((heads, heads // groups, length, length), block_elements=block_elements)
    del observers[case.module]  # the recorder would keep them
    with LargestOutput() as largest:
        observed_attention(case.module, *case.inputs, None)
    output_elements = BATCH * heads * length * HEAD_WIDTH
    assert output_elements <= largest.elements <= max(block_elements, output_elements)
    assert largest.elements < length * length / 4  # a quarter of one head's scores in one window


def test_models_use_it_by_name(tiny_gpt2, tiny_tokens):
    eager = tiny_gpt2.base_model
    eager.set_attn_implementation("eager")
    want = eager(tiny_tokens).last_hidden_state
    set_attention(eager, OBSERVED_EAGER)
    torch.testing.assert_close(eager(tiny_tokens).last_hidden_state, want, rtol=1e-5, atol=1e-5)


def test_models_with_padding_use_it_by_name(tiny_gpt2, tiny_tokens):
    padding = torch.ones_like(tiny_tokens)
    padding[1, :7] = 0
    model, kept = tiny_gpt2.base_model, padding.bool()
    model.set_attn_implementation("eager")
    want = model(tiny_tokens, attention_mask=padding).last_hidden_state[kept]
    set_attention(model, OBSERVED_EAGER)
    got = model(tiny_tokens, attention_mask=padding).last_hidden_state[kept]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_models_with_cached_keys_use_it_by_name(tiny_gpt2, tiny_tokens):
    model = tiny_gpt2.base_model
    set_attention(model, OBSERVED_EAGER)
    whole = model(tiny_tokens).last_hidden_state
    first = model(tiny_tokens[:, :25], use_cache=True)
    rest = model(tiny_tokens[:, 25:], past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.last_hidden_state, whole[:, 25:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("emulated", [False, True])
def test_scores_are_scaled_after_the_product(width, format, emulated):
    """Bit for bit, also where 1 / sqrt(width) is a power of two. Products of fp8 may saturate before."""
    chosen, recorder, module = get_format(format), Recorder(), Module(is_causal=False)
    query, key, value = (chosen.round(20 * torch.randn(2, 3, 9, width)) for _ in range(3))
    observers[module] = recorder
    with Emulation(chosen) if emulated else nullcontext():
        observed_attention(module, query, key, value, None)
        expected = query @ key.mT * width**-0.5
    assert torch.equal(recorder.assembled(recorder.seen_scores), expected)
    assert torch.equal(recorder.query, query)


# --- Hiding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shape", [(3, 4), (1, 1, 3, 4), (1, 2, 3, 4)])
def test_hiding_fills_bit_for_bit(dtype, gradient, shape):
    scores = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0, 0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])  # an overflow may give these
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    filled, hiding = scores.clone().requires_grad_(gradient).clone(), attention.Hiding(hidden, dtype)
    for number in (0, torch.finfo(dtype).min):
        hiding.fill(filled, number)
        expected = scores.masked_fill(hidden, number)
        torch.testing.assert_close(filled.detach(), expected, rtol=0, atol=0, equal_nan=True)


def test_rows_that_see_nothing_pass_no_gradient_on():
    """Their probabilities do not depend on their scores."""
    query, key, value = (torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])[None, None]
    query.requires_grad_()
    context, _ = observed_attention(Module(), query, key, value, mask)
    context.square().sum().backward()
    assert not query.grad[0, 0, 1].any() and query.grad[0, 0, 2].any()


def test_tangents_of_hidden_scores_are_hidden():
    """Forward derivatives are those of a softmax over the visible keys; they are 0 for rows that see none."""
    query, key, value, direction = (torch.randn(1, 1, 3, 4).double() for _ in range(4))
    key[0, 0, 2] = torch.inf  # hidden from the first two rows
    seen = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])

    def first_rows(query: torch.Tensor) -> torch.Tensor:
        return observed_attention(Module(), query, key, value, seen[None, None])[0]

    _, image = torch.func.jvp(first_rows, (query,), (direction,))
    scores, change = (x[0, 0, 1] @ key[0, 0, :2].mT / 2 for x in (query, direction))
    p = scores.softmax(-1)
    torch.testing.assert_close(image[0, 1, 0], (p * (change - p @ change)) @ value[0, 0, :2])
    assert not image[0, 0].any() and not image[0, 2].any()
