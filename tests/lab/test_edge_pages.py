"""Pages of models at the edges: nothing rounded, an overflow that is not measured, one in the head alone."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import TINY, random_gpt2, random_model, random_tokens
from transformers import LlamaConfig, PhiConfig, PhimoeConfig

from fragility_adjoint.mixed_precision.errors import Errors
from fragility_lab import diagnosis
from fragility_lab.diagnosis import page, plans
from fragility_lab.diagnosis.loading import require_causal
from fragility_lab.diagnosis.means import mean_of
from fragility_lab.diagnosis.needs import Forecast
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.tokens import ErrorsByToken, usual
from fragility_lab.inputs.loading import Inputs
from fragility_lab.inputs.local import local_rows
from fragility_lab.measurement.comparison import by_token

ASKED = Request("embedded", "embedded", "bf16", "1 block", windows=3, length=16)
TOKENS = random_tokens(3, 16)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": TINY.vocab_size,
    "max_position_embeddings": 64,
}  # fmt: skip


def paged(model, **changes):
    """The diagnosis of a model that was made here, and its page in one line."""
    found = diagnosis.diagnose(
        replace(ASKED, **changes), Inputs(model, TOKENS.flatten(), ""), TOKENS, Forecast(1.0, 1, None)
    )
    return found, " ".join(page.page(found).split())


@pytest.mark.parametrize("target", ["hidden", "kl", "flips"])
def test_a_page_where_nothing_is_rounded_says_so(target):
    """As of a checkpoint in bf16 whose weights are rounded to bf16."""
    model = random_gpt2(TINY)
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    found, html = paged(model, weights_only=True, target=target)
    found.require_complete()
    assert (found.measured.mismatch == 0).all() and (found.prediction.windows.predicted == 0).all()
    assert (Errors(model, TOKENS, found.prediction).by("layer").share == 0).all()
    assert "are safe here" in html and "Nothing is rounded here: every number" in html
    for name in ("by_token", "where", "coherence", "plan", "explore"):
        assert f'id="{name}"' not in html, name
    assert "recommended" not in html and "the plan<" not in html
    for words in ("did not help", "A few tokens decide", "heavy tail", "inf times", "nan", "NaN", "–</b>"):
        assert words not in html, words


def test_an_overflow_that_is_not_measured_has_its_remedy():
    model = random_gpt2(TINY)
    model.transformer.h[1].mlp.c_proj.weight.data *= 1e6
    found, html = paged(model, format="fp16", reference="no")
    found.require_complete()
    assert found.remedy.plan is not None and "With it, their mismatch is predicted as" in html
    assert "and measured as" not in html
    assert "a cast in transformer.h.1" in html and "_to_copy" not in html


@pytest.mark.parametrize("target", ["hidden", "kl"])
def test_an_overflow_in_the_head_alone_is_mended(target):
    model = random_gpt2(TINY)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1e5, requires_grad=False)
    model.config.tie_word_embeddings = False
    found, html = paged(model, format="fp16", target=target)
    found.require_complete()
    assert found.remedy.plan.label == "lm_head" and [*found.remedy.places] == [0, 1, 2]
    assert "fp16 overflows in 3 of 3 windows" in html or "fp16 gives no finite probabilities in 3 of 3 windows" in html
    assert "come back with <b>lm_head</b> in fp32" in html


@pytest.mark.parametrize("target", ["hidden", "kl"])
def test_where_every_window_overflows_something_is_rounded(target):
    model = random_model(LlamaConfig(num_hidden_layers=3, **SIZES))
    model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    found, html = paged(model, format="fp16", target=target)
    found.require_complete()
    assert "3 of 3 windows overflow" in html and "Nothing is rounded here" not in html
    assert not found.prediction.finite and found.rounds


@pytest.mark.parametrize("format", ["fp16", "fp8-dynamic@fp16", "kv-fp8@fp16", "kv-int8@fp16"])
def test_where_some_windows_overflow_the_page_is_whole(format):
    """Errors of overflowing blocks are infinite in the table of drifts, not missing."""
    model = random_model(LlamaConfig(num_hidden_layers=3, **SIZES))
    model.model.layers[0].mlp.down_proj.weight.mul_(3e4)
    tokens = TOKENS.clone()
    with torch.no_grad():
        sizes = torch.stack([largest_mlp(model, w[None]) for w in tokens])
    model.model.layers[0].mlp.down_proj.weight.mul_(65504 / sizes.sort().values[1:].mean())  # the largest one overflows
    found, html = paged(model, format=format, budget="2 modules")
    found.require_complete()
    assert 0 < found.measured.kl.isna().sum() < 3 and 'id="where"' in html and found.remedy.plan is not None


def largest_mlp(model, window):
    """The largest entry that the first MLP gives for a window."""
    seen = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[-1].abs().max()))
    model(window)
    hook.remove()
    return seen[0]


def test_a_model_without_finite_numbers_in_fp32_is_refused():
    model = random_model(LlamaConfig(num_hidden_layers=2, **SIZES))
    require_causal(model, "this model")
    model.model.norm.weight[0] = torch.nan
    with pytest.raises(
        ValueError, match="a model must give finite logits in fp32, but those of 'this model' are NaN or infinite"
    ):
        require_causal(model, "this model")


def test_a_window_that_fp32_does_not_compute_is_told_and_has_no_remedy():
    """The token 5, in one window, has a row of zeros, which a norm without epsilon divides by its root mean square."""
    model = random_model(LlamaConfig(num_hidden_layers=2, rms_norm_eps=0.0, **SIZES))
    model.model.embed_tokens.weight[5] = 0.0
    tokens = TOKENS.where(TOKENS != 5, 6)
    tokens[1, 3] = 5
    found = diagnosis.diagnose(ASKED, Inputs(model, tokens.flatten(), ""), tokens, Forecast(1.0, 1, None))
    html = " ".join(page.page(found).split())
    found.require_complete()
    assert found.lost_in_fp32 == {1} and found.remedy is None
    assert "fp32 itself gives no finite numbers in 1 of 3 windows" in html
    assert "windows overflow" not in html and "no finite numbers in 1 of 3 windows; in the others" not in html
    assert "division by zero" not in html.partition('id="range"')[0]


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_a_token_that_is_left_out_has_no_part_in_the_divergence(format):
    """As of a padded vocabulary: the lowest number of fp32 is minus infinity in both formats."""
    model = random_model(PhiConfig(num_hidden_layers=2, **SIZES))
    model.lm_head.bias[-4:] = torch.finfo(torch.float32).min
    found, html = paged(model, format=format, target="kl")
    found.require_complete()
    assert found.measured.kl.notna().all() and (found.measured.kl > 0).all() and 'class="banner' in html
    exact, low = (torch.randn(1, 4, TINY.vocab_size) for _ in range(2))
    want = (exact.log_softmax(-1).exp() * (exact.log_softmax(-1) - low.log_softmax(-1))).sum(-1)
    padded = [torch.cat([x, torch.full((1, 4, 2), -torch.inf)], -1) for x in (low, exact)]
    assert by_token(*padded, TOKENS[:1, :4]).kl.numpy() == pytest.approx(want.numpy(), rel=1e-5)


def test_a_plan_that_keeps_nothing_is_told_as_that():
    """All branches give zeros, and embedding and head are numbers of the format."""
    model = random_gpt2(TINY)
    for block in model.transformer.h:
        for layer in (block.attn.c_proj, block.mlp.c_proj):
            layer.weight.data.zero_(), layer.bias.data.zero_()
    _, html = paged(model)
    assert "the plan keeps nothing in fp32" in html and "keep <b>nothing</b>" not in html


def test_the_code_of_a_plan_with_static_scales_runs():
    """It measures the scales over the reader's text."""
    request = replace(ASKED, format="fp8-static", model="embedded", windows=1)
    found = diagnosis.diagnose(request, *diagnosis.load(request), Forecast(1.0, 1, None))
    names: dict = {}
    exec(plans.snippet(request, found.plan, found.attention), names)
    assert names["logits"].isfinite().all()


def test_weights_alone_have_no_cache():
    for recipe in ("kv-fp8", "w4a16-g32+kv-int8", "kv-fp8@fp32"):
        with pytest.raises(ValueError, match="a KV cache holds no weights, which alone are to be rounded"):
            replace(ASKED, format=recipe, weights_only=True)


def test_a_tail_is_told_beside_the_tokens_that_have_an_error():
    """One token's row differs: most tokens have none."""
    errors = np.zeros((1, 40))
    errors[0, 21:] = 1e-4
    errors[0, 30] = 1.0
    table = pd.DataFrame({"window": 0, "position": range(40), "error": errors[0]})
    known = ErrorsByToken({0: torch.arange(40)}, table, table, {}, 1, 1)
    tail = known.tail("error", 6)
    assert tail.position.tolist() == [30] and tail.times.tolist() == pytest.approx([1e4])
    none = replace(known, measured=table.assign(error=0.0))
    assert none.tail("error", 6).empty and not none.summary("error").few.any() and none.summary("error").in_tail[0] == 0
    assert usual([0, 0, 0, 4.0, 2.0]) == 3 and usual([1, 2, 3]) == 2 and np.isnan(usual([0, 0]))


@pytest.mark.parametrize("value", ["0", "false", "[]", "{}", "0.0"])
def test_rows_that_are_no_strings_are_refused(tmp_path, value):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "words"}}\n{{"text": {value}}}\n')
    with pytest.raises(ValueError, match='the column "text" of .* must hold strings, got'):
        local_rows(str(file))


def test_words_that_look_like_missing_values_stay(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('text,n\nNA,1\nnull,2\n"",3\nNone,4\nnan,5\n')
    assert local_rows(str(file)) == ["NA", "null", "None", "nan"]


@pytest.mark.parametrize(
    "text", ["text\nHello, world\nplain\n", "id,text\n1,Hello, world\n2,plain\n", "text,id\nplain,1\nHello, world,2\n"]
)
def test_rows_with_commas_out_of_quotes_are_refused(tmp_path, text):
    file = tmp_path / "rows.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match="quotes|Expected . fields"):
        local_rows(str(file))
    file.write_text('id,text\n1,"Hello, world"\n2,plain\n')
    assert local_rows(str(file)) == ["Hello, world", "plain"]


def test_a_router_without_topk_is_told_where_the_prediction_fails():
    """PhiMoE chooses by ``max``, so that nothing counts its choices."""
    config = PhimoeConfig(
        vocab_size=TINY.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    found, html = paged(random_model(config), format="fp8_e4m3")
    assert found.changed_experts is None
    told = "This model chooses experts, too, in a way that this page does not follow"
    assert told in html


@pytest.mark.parametrize("budget", ["9 bits", "1 MB", "KL 0.01"])
def test_weights_alone_are_divided_between_schemes_that_round_weights_alone(budget):
    """Or inputs would be rounded as well where the budget chooses schemes, and nowhere else."""
    replace(ASKED, format="fp8-w", weights_only=True, target="kl", budget=budget)
    for recipe in ("fp8-dynamic", "w8a8-int8", "ggml-q4_k"):
        replace(ASKED, format=recipe, target="kl", budget=budget)
        with pytest.raises(ValueError, match=f"a recipe that rounds weights alone.* got '{recipe}', which rounds"):
            replace(ASKED, format=recipe, weights_only=True, target="kl", budget=budget)


def test_an_interval_of_shares_ends_at_one():
    values = pd.Series([1.0, 1.0, 0.7])
    assert mean_of(values, shares=True)["high"] == 1 < mean_of(values)["high"]
