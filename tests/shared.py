"""Models and reference values shared by the tests; see data/README.md for where the values come from."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from remembered import remember_tokens
from tiny import TINY, random_gpt2, random_tokens, tiny_inputs
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from fragility_lab.inputs.checkpoints import load_model
from fragility_lab.inputs.loading import Inputs

DATA = Path(__file__).parent / "data"

settings.register_profile("any machine", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("any machine")
remember_tokens()


@pytest.fixture(autouse=True)
def closed_figures():
    """Close the figures that a test leaves: matplotlib warns in another test when twenty of a process are open."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture
def tiny_gpt2() -> GPT2LMHeadModel:
    """Three blocks of width 32 and random LayerNorms, fresh for every test."""
    return random_gpt2(TINY)


@pytest.fixture(scope="session")
def tiny_tokens() -> torch.Tensor:
    """Three windows of 40 tokens for ``tiny_gpt2``."""
    return random_tokens(3, 40)


@pytest.fixture
def inputs(tiny_gpt2) -> Inputs:
    """``tiny_gpt2`` and a stream of 400 tokens, as an experiment loads them."""
    return tiny_inputs(tiny_gpt2)


@pytest.fixture(scope="session")
def reference_model_path() -> Path:
    """The folder of the release's reference checkpoint."""
    return DATA / "model"


@pytest.fixture(scope="session")
def reference_model(reference_model_path) -> PreTrainedModel:
    """The release's reference checkpoint with its language-model head, in fp32; not to be changed."""
    return load_model(str(reference_model_path), "cpu", AutoModelForCausalLM)


@pytest.fixture(scope="session")
def reference_e1() -> dict:
    """The tables of E1."""
    return json.loads((DATA / "e1.json").read_text())


@pytest.fixture(scope="session")
def reference_e2() -> list[dict]:
    """One record per window and format of E2."""
    return json.loads((DATA / "e2.json").read_text())["e2"]


@pytest.fixture(scope="session")
def reference_e3() -> list[dict]:
    """One record per window and format of E3."""
    return json.loads((DATA / "e3.json").read_text())


@pytest.fixture(scope="session")
def reference_windows() -> dict[int, torch.Tensor]:
    """Token windows (B, T) by their length T."""
    windows = json.loads((DATA / "e2.json").read_text())["windows"]
    return {int(length): torch.tensor(tokens) for length, tokens in windows.items()}


@pytest.fixture(scope="session")
def reference_training() -> dict:
    """The first steps of E5 under policy ``none``, and the mismatches and onsets of four policies."""
    return json.loads((DATA / "e5_training.json").read_text())
