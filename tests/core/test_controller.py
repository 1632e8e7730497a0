"""A controller in training loops that save and resume, and models that change under it."""

import copy
import pickle

import pytest
import torch
from tiny import TINY, random_gpt2
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedModel

from fragility_core import Controller, Monitor, lower, observe

EAGER_POLICY = {"warmup_steps": 1, "trigger_quantile": 0.0, "cooldown_steps": 1}


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, controller: Controller, tokens: Tensor):
    """The loss of an optimizer step of AdamW, the signal after it, and the epsilons that it was taken with."""
    epsilons = [norm.eps for block in model.transformer.h for norm in (block.ln_1, block.ln_2)]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), controller.step(tokens).windows.combined.item(), epsilons


def test_a_resumed_run_goes_on_with_the_epsilons_that_it_had(tiny_gpt2, tiny_tokens):
    model = copy.deepcopy(tiny_gpt2).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    controller = Controller(model, "bgss", "bf16", **EAGER_POLICY)
    for number in range(4):
        step(model, optimizer, controller, tiny_tokens[number % 2 :][:1])
    assert max(controller.state.epsilon) > 1e-5
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict(), controller.state))
    went_on = [step(model, optimizer, controller, tiny_tokens[:1]) for _ in range(3)]

    weights, moments, state = pickle.loads(saved)
    again = copy.deepcopy(tiny_gpt2).requires_grad_(True)
    again.load_state_dict(weights)
    resumed = torch.optim.AdamW(again.parameters(), 1e-3)
    resumed.load_state_dict(moments)
    second = Controller(again, "bgss", "bf16", **EAGER_POLICY)
    second.state = state
    for (loss, signal, epsilons), want in zip(
        [step(again, resumed, second, tiny_tokens[:1]) for _ in range(3)], went_on
    ):
        assert (loss, epsilons) == (want[0], want[2])
        assert signal == pytest.approx(want[1], rel=1e-4)  # norms of weights are measured anew, not followed
    assert second.state.epsilon == controller.state.epsilon


def test_a_state_of_another_model_is_refused(tiny_gpt2):
    controller = Controller(copy.deepcopy(tiny_gpt2), "none")
    with pytest.raises(ValueError, match="a state must be of the model's 3 blocks, got one of 4"):
        controller.state = controller.policy.start(4)
    assert controller.state.layers == 3


class Adapted(nn.Module):
    """A layer with an adapter of rank 2 beside it."""

    def __init__(self, base: nn.Module, read: int, written: int):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(read, 2, bias=False), nn.Linear(2, written, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    model.transformer.h[1].mlp.c_proj = Adapted(model.transformer.h[1].mlp.c_proj, 128, 32)


def take_a_block_away(model):
    del model.transformer.h[2]


def cast(model):
    model.bfloat16()


def cast_up(model):
    model.double()


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def resize(model):
    model.resize_token_embeddings(TINY.vocab_size + 7)


def replace_a_block(model):
    """The epsilon of the new block would stay as it is."""
    model.transformer.h[0] = copy.deepcopy(model.transformer.h[1])


@pytest.mark.parametrize("change", [adapt, take_a_block_away, cast, cast_up, untie, resize, replace_a_block])
def test_a_model_that_changes_under_its_controller_is_refused(tiny_gpt2, tiny_tokens, change):
    model = copy.deepcopy(tiny_gpt2)
    controller = Controller(model, "none")
    controller.step(tiny_tokens[:1])
    change(model)
    with pytest.raises(
        ValueError, match="a shadow follows the blocks and parameters that its model had, but some were"
    ):
        controller.step(tiny_tokens[:1])


def test_parameters_may_be_assigned(tiny_gpt2, tiny_tokens):
    """As ``load_state_dict(assign=True)`` does, or a swap with averaged weights."""
    model = copy.deepcopy(tiny_gpt2)
    controller = Controller(model, "none")
    model.load_state_dict({path: 1.01 * x for path, x in model.state_dict().items()}, assign=True)
    model.tie_weights()
    found = controller.step(tiny_tokens[:1]).windows.mismatch
    assert found.item() == observe(model.eval(), tiny_tokens[:1]).windows.mismatch.item()


def test_models_that_no_controller_takes_are_refused_in_words(tiny_gpt2, tiny_tokens):
    with torch.device("meta"):
        unloaded = GPT2LMHeadModel(TINY)
    with pytest.raises(ValueError, match="weights must be loaded, got a model on the meta device"):
        Controller(unloaded)
    with pytest.raises(TypeError, match="a loss needs a head: load AutoModelForCausalLM, got GPT2Model"):
        Controller(copy.deepcopy(tiny_gpt2).transformer, "none").step(tiny_tokens[:1])
    with pytest.raises(TypeError, match=".module of DDP"):
        Controller(nn.Sequential(tiny_gpt2))


class LoRA(nn.Linear):
    """A linear layer with more inside than the product of its weight; its B begins at 0."""

    def __init__(self, features: int):
        super().__init__(features, features)
        self.A, self.B = nn.Parameter(torch.ones(2, features)), nn.Parameter(torch.zeros(features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.A.T @ self.B.T


def test_a_linear_layer_with_other_parameters_is_not_taken_for_its_weight(tiny_gpt2, tiny_tokens):
    model = copy.deepcopy(tiny_gpt2)
    model.transformer.h[0].attn.c_proj = LoRA(32)
    with pytest.raises(TypeError, match="it needs linear layers of a weight and a bias alone, got also ..A., .B..,"):
        observe(model, tiny_tokens)


def test_a_block_copied_with_its_configuration_is_refused_in_words(tiny_tokens):
    """It goes on with the attention of its own configuration, which no observer sees."""
    model = random_gpt2(TINY)
    model.transformer.h[2] = copy.deepcopy(model.transformer.h[1])
    with pytest.raises(ValueError, match="the score needs one configuration for all blocks, got a block copied with"):
        Monitor(lower(model, "bf16"))(tiny_tokens)
