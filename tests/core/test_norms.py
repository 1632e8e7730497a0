"""Norms are recognised by what they compute."""

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fragility_core.models.norms import known_norm

KNOWN = {
    "LayerNorm": (nn.LayerNorm, True, 0.0),
    "LayerNorm spelled out": (CohereLayerNorm, True, 0.0),
    "RMSNorm": (lambda width, eps: nn.RMSNorm(width, eps=eps), False, 0.0),
    "Llama's": (LlamaRMSNorm, False, 0.0),
    "Gemma's, of weight + 1": (GemmaRMSNorm, False, 1.0),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.4, 3.0])
def test_known_norms(name, dtype, spread):
    """With any weights, fresh ones included, and in dtypes that round."""
    make, centred, offset = KNOWN[name]
    module = make(24, eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.add_(spread * torch.randn(24, generator=torch.Generator().manual_seed(0)))
    if getattr(module, "bias", None) is not None:
        module.bias.add_(spread)
    norm = known_norm(module)
    assert (norm.module, norm.centred, norm.offset) == (module, centred, offset)
    assert torch.equal(norm.gamma, module.weight.float() + 1 if offset else module.weight)
    norm.eps = 0.5
    assert norm.eps == 0.5 and 0.5 in (getattr(module, "eps", None), getattr(module, "variance_epsilon", None))


class Scale(nn.Module):
    """A module with a weight and an epsilon that normalizes nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize("module", [Scale(8), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8, elementwise_affine=False)])
def test_other_modules_are_no_norms(module):
    assert known_norm(module) is None
