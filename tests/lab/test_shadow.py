"""Shadow training: the release's trajectory, and what the mismatch compares."""

import runpy

import pytest
import torch

from fragility_core.models.blocks import blocks
from fragility_core.surrogates.monitor import window_losses
from fragility_core.theory import mismatch
from fragility_lab.experiments.shadow import ShadowTraining, warmed_up
from fragility_lab.paths import PROJECT
from fragility_numerics.attention import OBSERVED_EAGER
from fragility_quantization.quantized import lower


def test_training_follows_the_release(reference_model, reference_training):
    """32 steps of AdamW give the recorded gradients to 1e-5. The mismatch of one pass depends on the kernels."""
    config, windows = reference_training["config"], torch.tensor(reference_training["windows"])
    training = ShadowTraining(
        reference_model, "fp16", weight_decay=config["weight_decay"], clip=config["gradient_clip_norm"]
    )
    ratios = []
    for step, want in enumerate(reference_training["none"][:32]):
        tokens = windows[step][None]
        rate = warmed_up(config["learning_rate"], step, config["lr_warmup_steps"])
        _, gradient_norm = training.train_step(tokens, rate)
        assert gradient_norm == pytest.approx(want["grad_norm"], rel=1e-5)
        _, seen = training.shadow.observe(tokens)
        assert seen.loss.item() == pytest.approx(want["loss"], rel=1e-3)
        assert seen.combined.item() == pytest.approx(want["combined_scaled"], rel=5e-3)
        ratios.append(seen.mismatch.item() / want["final_mismatch"])
    assert torch.tensor(ratios).mean().item() == pytest.approx(1, abs=0.02)
    assert min(ratios) > 0.85 and max(ratios) < 1.15


@pytest.fixture
def training(tiny_gpt2) -> ShadowTraining:
    return ShadowTraining(tiny_gpt2, "fp16")


def test_the_mismatch_is_that_of_rounding_alone(training, tiny_tokens):
    """Master and shadow have the same weights and epsilons. An epsilon of 1 changes both."""
    tokens = tiny_tokens[:1]
    training.shadow.set_epsilons((1.0, 1e-5, 0.1))
    training.train_step(tokens, 1e-3)
    layers, windows = training.shadow.observe(tokens)
    fresh = lower(training.master, "fp16")
    with torch.no_grad():
        reference = training.master.base_model(tokens).last_hidden_state
        with fresh.running():
            hidden = fresh.model.base_model(tokens).last_hidden_state
    # The shadow's attention works in blocks of rows, the library's does not.
    assert windows.mismatch.item() == pytest.approx(mismatch(hidden, reference).item(), rel=0.2)
    assert layers.epsilon_1.tolist() == layers.epsilon_2.tolist() == [1.0, 1e-5, 0.1]
    for ours, masters in zip(training.shadow.low.model.parameters(), training.master.parameters()):
        assert torch.equal(ours, masters.half())
    assert [block.norm_1.eps for block in blocks(training.master)] == [1.0, 1e-5, 0.1]
    assert training.master.transformer.ln_f.eps == 1e-5


def test_the_master_keeps_the_librarys_attention(training, tiny_gpt2, tiny_tokens):
    """The reference pass is that of the model as loaded. Only the shadow is observed, and only during its pass."""
    during = []
    training.shadow.blocks[1][0].module.register_forward_pre_hook(
        lambda block, _: during.append([m.config._attn_implementation for m in (block.attn, training.master)])
    )
    training.shadow.observe(tiny_tokens[:1])
    assert during == [[OBSERVED_EAGER, "sdpa"]]
    for model in (training.master, training.shadow.low.model, tiny_gpt2):
        assert model.config._attn_implementation == "sdpa"


def test_the_given_model_is_left_alone(tiny_gpt2, tiny_tokens):
    before = {name: value.clone() for name, value in tiny_gpt2.state_dict().items()}
    training = ShadowTraining(tiny_gpt2, "fp16")
    training.shadow.set_epsilons((0.1, 0.1, 0.1))
    training.train_step(tiny_tokens[:1], 1e-3)
    assert all(torch.equal(value, before[name]) for name, value in tiny_gpt2.state_dict().items())
    assert blocks(tiny_gpt2)[0].norm_1.eps == 1e-5
    assert not any(parameter.requires_grad for parameter in tiny_gpt2.parameters())


def test_a_step_is_the_librarys_own(training, tiny_gpt2, tiny_tokens):
    """Against AdamW on the loss that transformers computes itself."""
    tokens = tiny_tokens[:1]
    loss, norm = training.train_step(tokens, 2e-3)
    tiny_gpt2.requires_grad_(True)
    logits = tiny_gpt2(tokens).logits
    want = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    want.backward()
    clipped = torch.nn.utils.clip_grad_norm_(tiny_gpt2.parameters(), 1.0)
    torch.optim.AdamW(tiny_gpt2.parameters(), lr=2e-3, weight_decay=0.0).step()
    assert loss == pytest.approx(want.item(), rel=1e-6)
    assert norm == pytest.approx(clipped.item(), rel=1e-5)
    for ours, theirs in zip(training.master.parameters(), tiny_gpt2.parameters()):
        if ours.ndim == 2:  # the gradient of the keys' biases is rounding alone, and Adam makes a full step of it
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dropout_is_active_in_training_only(tiny_gpt2, tiny_tokens):
    for module in tiny_gpt2.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    training, tokens = ShadowTraining(tiny_gpt2, "fp16"), tiny_tokens[:1]
    without = window_losses(tiny_gpt2(tokens).logits, tokens).item()
    torch.manual_seed(0)
    loss, _ = training.train_step(tokens, 0.0)
    assert loss != pytest.approx(without, rel=1e-3)
    assert training.shadow.observe(tokens)[1].loss.item() == pytest.approx(without, rel=1e-3)


def test_nonfinite_gradients_leave_the_weights(training, tiny_tokens):
    training.master.transformer.wte.weight.data[tiny_tokens[0, 0], 0] = torch.nan
    before = {name: value.clone() for name, value in training.master.state_dict().items()}
    loss, norm = training.train_step(tiny_tokens[:1], 1e-3)
    assert loss != loss and norm != norm
    for name, value in training.master.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize(("step", "rate"), [(0, 0.05), (9, 0.5), (19, 1.0), (20, 1.0), (300, 1.0)])
def test_warm_up(step, rate):
    assert warmed_up(1.0, step, 20) == pytest.approx(rate)
    assert warmed_up(1.0, step, 0) == 1.0


def test_bench_times_a_step_of_e5():
    """It takes longer than the training step alone, which is a part of it."""
    times = runpy.run_path(str(PROJECT / "tools/bench.py"))["time_training_step"](1)
    assert times["pass"].tolist() == ["E5 step / training step"] and times.ratio.item() > 1
