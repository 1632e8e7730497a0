"""Functions that keep rounded numbers as they are make no error of their own, at either end of a prediction."""

import pytest
import torch
from tiny import random_model, random_tokens
from torch.nn import functional
from transformers import LlamaConfig

from fragility_adjoint.predictor import Adjoint
from fragility_quantization.quantized import lower

CONFIG = LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=101,
)  # fmt: skip
TOKENS = random_tokens(3, 32)


def added(x: torch.Tensor) -> torch.Tensor:
    """``x`` (B, T, D), each row added to an empty one, as routers gather what experts give."""
    rows = x.flatten(0, 1)
    return torch.zeros_like(rows).index_add_(0, torch.arange(len(rows)), rows).view_as(x)


KEEPING = {
    "clamp": lambda x: x.clamp(-1e4, 1e4), "clamp_": lambda x: x.clone().clamp_(-1e4, 1e4),
    "clip": lambda x: torch.clip(x, min=-1e4), "pad": lambda x: functional.pad(x, (0, 3))[..., :-3],
    "requires_grad_": lambda x: x.requires_grad_(), "index_add_": added,
}  # fmt: skip


def predicted(target: str, change=None) -> torch.Tensor:
    """The prediction for TOKENS in bf16, with ``change`` behind each norm, attention and MLP of a new model."""
    model = random_model(CONFIG)
    for layer in model.model.layers if change else []:
        for module in (layer.input_layernorm, layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, inputs, output: change(output))
    found = Adjoint(lower(model, "bf16"), model, probes=2, target=target)(TOKENS)
    return torch.tensor(found.windows.predicted.to_numpy())


@pytest.mark.parametrize("target", ["hidden", "kl"])
@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_rounded_numbers_changes_no_prediction(name, target):
    torch.testing.assert_close(predicted(target, KEEPING[name]), predicted(target), rtol=1e-5, atol=0)


def test_a_bound_that_is_no_number_of_the_format_is_rounded():
    """0.3 is none of bf16: the low-precision pass clamps at the number next to it."""
    found = []
    for bound in (0.3, float(torch.tensor(0.3).bfloat16())):
        found.append(predicted("hidden", lambda x, bound=bound: x.clamp(-bound, bound)))
    assert found[0].isfinite().all() and (found[0] / found[1] - 1).abs().max() < 0.2


def test_a_model_that_was_made_ready_for_training_has_the_same_prediction():
    model = random_model(CONFIG)
    model.enable_input_require_grads()
    found = Adjoint(lower(model, "bf16"), model, probes=2, target="kl")(TOKENS)
    assert "requires_grad_" not in {*found.contributions.name}
    torch.testing.assert_close(torch.tensor(found.windows.predicted.to_numpy()), predicted("kl"), rtol=1e-5, atol=0)
