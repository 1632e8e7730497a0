"""The short ways into the core: scores in one call, a patched block, a controller in a loop, refused calls."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, random_model
from transformers import BatchEncoding, GPT2Config, LlamaConfig, T5Config, T5ForConditionalGeneration

import fragility_core
from fragility_adjoint.mixed_precision import Plan, apply
from fragility_core import FORMATS, Controller, Estimator, Monitor, final_hidden, lower, mismatch, observe, patch, score
from fragility_core.bgss import action_table
from fragility_core.models.padding import as_windows
from fragility_core.surrogates.patching import Patching
from fragility_numerics.attention import observing_attention
from fragility_quantization.quantized import lower as by_recipe
from fragility_quantization.recipes import RECIPES


def test_observe_is_a_monitored_pass_scored(tiny_gpt2, tiny_tokens, monkeypatch):
    """In batches or in one; windows are numbered over all of them."""
    low = lower(tiny_gpt2, "fp16")
    seen = Monitor(low)(tiny_tokens, final_hidden(tiny_gpt2, tiny_tokens))
    for paper in (Estimator(), Estimator(layernorm="paper")):
        layers, windows = observe(tiny_gpt2, tiny_tokens, "fp16", paper)
        want = score(seen.layers, seen.windows, 2.0**-11, paper)
        pd.testing.assert_frame_equal(windows, want.windows)
        pd.testing.assert_frame_equal(layers, want.layers)
        assert seen.scores(paper).windows.equals(want.windows)
    monkeypatch.setattr("fragility_core.surrogates.observe.BATCH", 1)
    alone = observe(tiny_gpt2, tiny_tokens, "fp16", paper)
    assert alone.windows.window.tolist() == [*range(len(tiny_tokens))]
    assert alone.windows.combined.tolist() == pytest.approx(windows.combined.tolist(), rel=1e-2)
    assert alone.layers.window.tolist() == layers.window.tolist()


def test_windows_come_in_many_forms(tiny_gpt2, tiny_tokens, monkeypatch):
    """A tensor, one window, lists, and what a tokenizer returns with its padding."""
    as_lists = tiny_tokens.tolist()
    assert as_windows(as_lists, tiny_gpt2)[0].equal(tiny_tokens)
    assert as_windows(as_lists[0], tiny_gpt2)[0].equal(tiny_tokens[:1])
    mask = torch.ones_like(tiny_tokens)
    mask[0, -3:] = 0
    encoded = BatchEncoding({"input_ids": tiny_tokens, "attention_mask": mask})
    windows = observe(tiny_gpt2, encoded, "bf16").windows
    short = observe(tiny_gpt2, tiny_tokens[:1, :-3], "bf16").windows
    assert windows.combined[0] == pytest.approx(short.combined[0], rel=1e-3)
    assert windows.mismatch[0] == pytest.approx(short.mismatch[0], rel=1e-3)
    monkeypatch.setattr("fragility_core.surrogates.observe.BATCH", 1)
    pd.testing.assert_frame_equal(observe(tiny_gpt2, encoded, "bf16").windows, windows, rtol=1e-2)
    with pytest.raises(ValueError, match="without padding, got a mask with 0: leave padding away"):
        Controller(copy.deepcopy(tiny_gpt2), "none").step({"input_ids": tiny_tokens[:1], "attention_mask": mask[:1]})


def test_windows_of_several_texts_are_refused(tiny_gpt2, tiny_tokens):
    """Collators that pack texts give positions in place of a mask."""
    mask = torch.ones_like(tiny_tokens)
    mask[:, :2] = 0
    for padding in (None, mask):
        counted = torch.ones_like(tiny_tokens) if padding is None else padding
        own = {"input_ids": tiny_tokens, "attention_mask": padding, "position_ids": counted.cumsum(1) - 1}
        assert as_windows(own, tiny_gpt2)[0].equal(tiny_tokens)
        own["position_ids"][:, 5:] -= 3
        with pytest.raises(ValueError, match="at the positions 0, 1, 2 and so on, got other position_ids"):
            as_windows(own, tiny_gpt2)


@pytest.mark.parametrize(
    ("tokens", "error", "line"),
    [
        ("some text", TypeError, "windows must be token ids, got text, 'some text': give what its tokenizer returns"),
        (["some", "text"], TypeError, "windows must be token ids, got text, ['some', 'text']"),
        (torch.rand(2, 3), TypeError, "windows must be token ids, got numbers of torch.float32"),
        ([[1, 2], [3]], ValueError, "windows must have one length, or a mask for their padding"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "windows must be (B, T) and not empty, got shape (1, 0)"),
        ([[[1, 2]]], ValueError, "windows must be (B, T) and not empty, got shape (1, 1, 2)"),
        ([[1, 10**6]], ValueError, "tokens must be in the model's vocabulary, 0 to "),
        (None, TypeError, "windows must be token ids, got a NoneType"),
        ([[10**30]], ValueError, "tokens must fit 64 bits"),
        ([{"ids": [1]}], TypeError, "windows must be token ids, got a list"),
        ([torch.arange(2), torch.arange(2)], TypeError, "windows must be token ids, got a list: give a tensor (B, T)"),
        ({"ids": [[1, 2]]}, TypeError, "windows must be token ids, input_ids of a tokenizer, got ids"),
        (torch.ones(1, 2, dtype=torch.bool), TypeError, "windows must be token ids, got numbers of torch.bool"),
        (torch.ones(1, 2, dtype=torch.complex64), TypeError, "windows must be token ids, got numbers of torch.comp"),
        ([[1, -1]], ValueError, "tokens must be in the model's vocabulary, 0 to "),
        ([[1] * 5000], ValueError, "windows must fit the model's context, "),
    ],
)
def test_other_windows_are_refused(tiny_gpt2, tokens, error, line):
    with pytest.raises(error) as caught:
        observe(tiny_gpt2, tokens)
    assert str(caught.value).startswith(line)
    with pytest.raises(error) as caught:
        Controller(copy.deepcopy(tiny_gpt2), "none").step(tokens)
    assert str(caught.value).startswith(line)


def test_passes_that_take_tensors_say_so(tiny_gpt2, tiny_tokens):
    monitor = Monitor(lower(tiny_gpt2, "bf16"))
    for given in ("text", tiny_tokens.tolist(), tiny_tokens.numpy(), BatchEncoding({"input_ids": tiny_tokens}), None):
        with pytest.raises(TypeError, match=f"a tensor .B, T. of token ids, got a {type(given).__name__}"):
            monitor(given)
    with pytest.raises(TypeError, match="a torch module is needed, got a LowPrecision: give low.model inside"):
        final_hidden(monitor.low, tiny_tokens)
    for dtype in ("uint8", "uint16", "int32"):  # as files of tokens have them
        assert as_windows(np.ones((1, 3), dtype), tiny_gpt2)[0].dtype == torch.int64


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch.compile
def test_what_is_no_loaded_model_is_refused(tiny_gpt2, tiny_tokens):
    for given in ("gpt2", None, lower(tiny_gpt2, "bf16"), torch.compile(tiny_gpt2), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"a model of transformers is needed, got a {type(given).__name__}"):
            observe(given, tiny_tokens)
    with pytest.raises(ValueError, match="weights must be loaded, got a model on the meta device"):
        observe(copy.deepcopy(tiny_gpt2).to("meta"), tiny_tokens)


@pytest.mark.parametrize(("format", "execution"), [("bf16", "native"), ("bf16", "emulated"), ("fp8_e4m3", "emulated")])
def test_a_patched_block_is_that_of_patching(tiny_gpt2, tiny_tokens, format, execution):
    low = lower(tiny_gpt2, format, execution)
    stacked = Patching(tiny_gpt2, low)(tiny_tokens)
    with torch.no_grad(), observing_attention(low.model), low.running():  # as the stacked passes
        for block in range(3):
            with patch(low, tiny_gpt2, np.int64(block)):
                assert final_hidden(low.model, tiny_tokens).equal(stacked[block + 1])
        assert final_hidden(low.model, tiny_tokens).equal(stacked[0])  # nothing is left behind
    with pytest.raises(IndexError, match="block must be one of 0 to 2, got 3"):
        patch(low, tiny_gpt2, 3)
    for block in ("h.1", 1.0, None):
        with pytest.raises(TypeError, match="a block is a number, 0 to 2, got"):
            patch(low, tiny_gpt2, block)
    for first in (tiny_gpt2, "bf16"):
        with pytest.raises(TypeError, match="a model in low precision is needed"):
            patch(first, tiny_gpt2, 1)
    with pytest.raises(TypeError, match="a model of transformers is needed, got a LowPrecision"):
        patch(low, low, 1)
    with pytest.raises(ValueError, match="need both models in eval mode, got training mode: call model.eval"):
        patch(low, copy.deepcopy(tiny_gpt2).train(), 1)
    with pytest.raises(ValueError, match="low must be lowered from this model, got 3 blocks in place of 1"):
        patch(low, random_gpt2(GPT2Config(**(TINY.to_dict() | {"n_layer": 1}))), 1)


@pytest.mark.parametrize("recipe", ["fp8-dynamic", "w8a8-int8", "w4a16-g32", "kv-fp8", "fp8-dynamic+kv-int8"])
def test_a_model_in_a_recipe_is_patched_as_its_plan_keeps_the_block(tiny_gpt2, tiny_tokens, recipe):
    low, plan = by_recipe(tiny_gpt2, recipe), Plan(recipe, modules=("transformer.h.1",), label="h.1")
    kept = apply(tiny_gpt2, plan)
    with torch.no_grad():
        with patch(low, tiny_gpt2, 1):
            patched = low(tiny_tokens).logits
        planned, whole, plain = kept(tiny_tokens).logits, tiny_gpt2(tiny_tokens).logits, low(tiny_tokens).logits
    off = [mismatch(each, whole).mean().item() for each in (patched, planned, plain)]
    assert off[0] == pytest.approx(off[1], rel=0.2) and off[0] != off[2]


def test_a_patched_block_reads_its_own_keys_and_values(tiny_gpt2, tiny_tokens):
    """With the cache that a model fills by default, and without one; a cache of passes before is refused."""
    low = lower(tiny_gpt2, "fp8_e5m2")
    with torch.no_grad(), patch(low, tiny_gpt2, 1):
        want = low(tiny_tokens, use_cache=False).logits
        found = low(tiny_tokens, use_cache=True)
        assert found.logits.equal(want) and found.past_key_values.get_seq_length() == tiny_tokens.shape[1]
        with pytest.raises(ValueError, match="all tokens at once, got a cache of earlier ones: give no cache"):
            low(tiny_tokens[:, :1], past_key_values=found.past_key_values)


def test_all_blocks_patched_leave_the_ends(tiny_gpt2, tiny_tokens):
    """Patched one inside of the other, as contexts are; what is left are embedding, final norm and casts."""
    low = lower(tiny_gpt2, "bf16")
    exact = final_hidden(tiny_gpt2, tiny_tokens)
    with torch.no_grad(), low.running():
        base = mismatch(final_hidden(low.model, tiny_tokens), exact)
        with patch(low, tiny_gpt2, 0), patch(low, tiny_gpt2, 1), patch(low, tiny_gpt2, 2):
            left = mismatch(final_hidden(low.model, tiny_tokens), exact)
    assert (left < base).all() and (left > 0).all()


def trained(model, tokens, policy: str, steps: int, **parameters) -> Controller:
    """The controller of a loop of SGD on one window."""
    model = copy.deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    controller = Controller(model, policy, "fp16", **parameters)
    model.train()
    for _ in range(steps):
        logits = model(tokens).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scores = controller.step(tokens)
        assert model.training and scores.windows.mismatch.between(1e-5, 0.1).all()
    return controller


@pytest.mark.parametrize("execution", ["auto", "weights"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_controller_observes_what_observe_does(tiny_gpt2, tiny_tokens, name, execution):
    """In TF32 weights are stored in fp32: only the operands of products are rounded."""
    window = tiny_tokens[:1]
    alone = observe(tiny_gpt2, window, name, execution=execution).windows
    found = Controller(copy.deepcopy(tiny_gpt2), "none", name, execution=execution).step(window).windows
    assert found.mismatch.item() == alone.mismatch.item()
    assert found.combined.item() == pytest.approx(alone.combined.item(), rel=1e-6)  # the loss adds a pass


@pytest.mark.parametrize("transport", ["operator_norm", "power_iteration"])
def test_a_controller_scores_by_its_estimator(tiny_gpt2, tiny_tokens, transport):
    estimator, window = Estimator(transport=transport), tiny_tokens[:1]
    found = Controller(copy.deepcopy(tiny_gpt2), "none", "bf16", estimator).step(window)
    alone = observe(tiny_gpt2, window, "bf16", estimator)
    assert found.windows.combined.item() == pytest.approx(alone.windows.combined.item(), rel=1e-4)
    assert ("branch_jacobian_norm" in found.layers) == (transport == "power_iteration")
    loss = Monitor(lower(tiny_gpt2, "bf16"))(window, loss=True).windows.loss
    assert found.windows.loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_controller_sets_the_first_epsilons_at_once(tiny_gpt2):
    controller = Controller(copy.deepcopy(tiny_gpt2), "static_global", "bf16", static_epsilon=1e-3)
    for model in (controller.model, controller.shadow.low.model):
        assert all(norm.eps == 1e-3 for block in model.transformer.h for norm in (block.ln_1, block.ln_2))


def test_a_controller_refuses_norms_with_several_epsilons(tiny_gpt2):
    model = copy.deepcopy(tiny_gpt2)
    model.transformer.h[1].ln_2.eps = 1e-3
    with pytest.raises(ValueError, match="a policy begins with one epsilon for all norms, got .1e-05, 0.001."):
        Controller(model, "none", "bf16")
    assert model.transformer.h[1].ln_2.eps == 1e-3


def test_a_controller_refuses_autocast_and_goes_on_after_it(tiny_gpt2, tiny_tokens):
    controller = Controller(copy.deepcopy(tiny_gpt2), "none", "bf16")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="got torch.autocast: leave its con"):
        controller.step(tiny_tokens[:1])
    assert controller.step(tiny_tokens[:1]).windows.mismatch.gt(0).all()


def test_tables_in_any_order_of_windows_are_scored(tiny_gpt2, tiny_tokens):
    seen = Monitor(lower(tiny_gpt2, "fp16"))(tiny_tokens, final_hidden(tiny_gpt2, tiny_tokens))
    plain = score(seen.layers, seen.windows, 2.0**-11).windows
    layers = seen.layers.sort_values(["window", "layer"], ascending=[False, True])
    turned = score(layers, seen.windows.iloc[::-1], 2.0**-11).windows
    assert turned.combined.tolist() == plain.combined.tolist()[::-1]


def test_a_controller_raises_epsilons_in_a_loop(tiny_gpt2, tiny_tokens):
    """The policy acts on model and copy alike, and its state says so; the copy has the model's weights."""
    controller = trained(tiny_gpt2, tiny_tokens[:1], "static_global", 2, static_epsilon=1e-3)
    model, low = controller.model, controller.shadow.low.model
    assert controller.state.step == 2 and len(action_table(controller.state)) == 3
    for each in (model, low):
        assert (
            {block.ln_1.eps for block in each.transformer.h}
            == {block.ln_2.eps for block in each.transformer.h}
            == {1e-3}
        )
    assert all(torch.equal(ours, theirs.half()) for ours, theirs in zip(low.parameters(), model.parameters()))
    quiet = trained(tiny_gpt2, tiny_tokens[:1], "none", 2)
    assert action_table(quiet.state).empty and quiet.model.transformer.h[0].ln_1.eps == 1e-5
    with pytest.raises(ValueError, match="one window"):
        quiet.step(tiny_tokens)
    quiet.model.transformer.h[0].eval()  # frozen, as the rest trains
    quiet.step(tiny_tokens[:1])
    assert quiet.model.training and not quiet.model.transformer.h[0].mlp.training


@pytest.mark.parametrize("name", ["fp8_e4m3", "w8a8-int8", "kv-fp8", "bf16"])
def test_a_bare_call_of_a_lowered_model_is_refused_where_it_would_be_wrong(tiny_gpt2, tiny_tokens, name):
    low = by_recipe(tiny_gpt2, name)
    with torch.no_grad(), low.running():
        want = low.model(tiny_tokens).logits
        inside = final_hidden(low.model, tiny_tokens)
    with torch.no_grad():
        assert low(tiny_tokens).logits.equal(want)
        for call in (lambda: low.model(tiny_tokens).logits, lambda: final_hidden(low.model, tiny_tokens)):
            if name in ("bf16", "kv-fp8") and low.execution == "native":
                assert torch.isin(call().sum(), torch.stack([want.sum(), inside.sum()])).item()
            else:
                with pytest.raises(RuntimeError, match="bare call"):
                    low.model(tiny_tokens, inputs_embeds=None)
                with pytest.raises(RuntimeError, match=r"with low.running\(\).*call low\(tokens\)"):
                    call()
        copied = copy.deepcopy(low.model)
        if name != "w8a8-int8":  # whose weights are wider than its kernels
            copied(tiny_tokens)  # copies are run in contexts of their owners


def test_names_of_the_package():
    assert {"observe", "patch", "Controller", "lower", "Monitor", "score"} <= set(fragility_core.__all__)
    assert len(fragility_core.__all__) <= 20


def test_formats_are_known_by_torch_s_names_too(tiny_gpt2):
    assert lower(tiny_gpt2, torch.float16).name == "fp16" and by_recipe(tiny_gpt2, torch.bfloat16).name == "bf16"
    assert lower(tiny_gpt2, torch.float32).name == "fp32"  # tf32 has the same dtype
    for low in (lower, by_recipe):
        for name, meant in (("float16", "fp16"), ("torch.bfloat16", "bf16"), ("half", "fp16"), ("BF16", "bf16")):
            with pytest.raises(ValueError, match=rf"got '{name}' \(do you mean {meant}\?\)"):
                low(tiny_gpt2, name)
        with pytest.raises(ValueError, match="a dtype must be that of a format"):
            low(tiny_gpt2, torch.int8)
        with pytest.raises(TypeError, match="a model is lowered, got a str, 'gpt2': load it first"):
            low("gpt2", "bf16")
    for recipe, error in (("w8a8-int8", ValueError), (RECIPES["w8a8-int8"], TypeError)):
        with pytest.raises(error, match="fragility_adjoint.lower takes recipes"):
            lower(tiny_gpt2, recipe)


@pytest.mark.filterwarnings("ignore")  # torch.ao says that it is old
def test_a_model_that_torch_quantized_is_refused(tiny_tokens):
    llama = random_model(LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
    packed = torch.ao.quantization.quantize_dynamic(llama, {torch.nn.Linear}, dtype=torch.qint8).eval()
    with pytest.raises(TypeError, match=r"lowered from fp32, got .* quantized by torch.ao: load the original"):
        observe(packed, tiny_tokens, "bf16")


def test_torch_must_compute_as_it_is_told(tiny_gpt2, tiny_tokens):
    """Otherwise the reference in fp32 would be one in bf16, or a pass would end in an error of torch."""
    low = lower(tiny_gpt2, "bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (lambda: observe(tiny_gpt2, tiny_tokens, "fp32"), lambda: low.running().__enter__()):
            with pytest.raises(ValueError, match=r"the dtypes of their operands, got torch.autocast: leave its"):
                call()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"got torch.inference_mode.*: use torch.no_grad"):
        observe(tiny_gpt2, tiny_tokens)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match=r"got torch.set_default_dtype\(torch.float64\): set torch.float32"):
            observe(tiny_gpt2, tiny_tokens)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_encoder_with_a_decoder_is_refused():
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(ValueError, match="a decoder alone is needed, got T5ForConditionalGeneration, which has an enc"):
        observe(model, torch.ones(1, 4, dtype=torch.long))


def test_a_policy_without_its_parameter_says_which(tiny_gpt2):
    for name in ("eps_bump", "bgss_printed"):
        with pytest.raises(TypeError, match=f"the policy '{name}' needs a value for target_ratio.*: give it by name"):
            Controller(tiny_gpt2, name)
    with pytest.raises(TypeError, match="the policy 'bgss' has the parameters base_epsilon, .*, got max_actions"):
        Controller(tiny_gpt2, "bgss", max_actions=3)


def test_names_in_place_of_estimators_and_wrapped_models_are_refused_in_one_line(tiny_gpt2, tiny_tokens):
    with pytest.raises(TypeError, match=r'an estimator is given as Estimator\(layernorm="paper"\), got \'paper\''):
        observe(tiny_gpt2, tiny_tokens, "fp16", "paper")
    for run in (lambda model: observe(model, tiny_tokens), lambda model: lower(model, "bf16")):
        with pytest.raises(TypeError, match=r"got a LowPrecision, LowPrecision\(model=GPT2.*from_pretrained"):
            run(lower(tiny_gpt2, "bf16"))
    with pytest.raises(TypeError, match="windows must be a tensor .B, T. of token ids, got a list"):
        final_hidden(tiny_gpt2, tiny_tokens.tolist())
    with pytest.raises(ValueError, match="tokens must be in the model's vocabulary, 0 to 100, got 101"):
        Monitor(lower(tiny_gpt2, "bf16"))(torch.full((1, 3), 101))
