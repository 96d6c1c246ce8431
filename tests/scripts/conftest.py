"""Shared by tests of scripts."""

import shutil
from pathlib import Path

import pytest

DEMO_TARGET = Path(__file__).parents[2] / "assets" / "demo-target"


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target and tokenizer, with two of its six layers: where what it writes is not
    looked at, the others take time alone."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("short") / "demo-target"
    shutil.copytree(DEMO_TARGET, folder)
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, num_hidden_layers=2)
    model.save_pretrained(folder)
    return folder
