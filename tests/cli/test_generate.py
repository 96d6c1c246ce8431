"""`medusa-heads generate`: streams exactly what generate() returns; mistakes are one sentence."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint import save_heads
from medusa_heads.cli.generate import main
from tests.conftest import TinyLlama


@pytest.fixture(scope="module")
def checkpoint(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that speaks single bytes, and fresh heads on it."""
    folder = tmp_path_factory.mktemp("generate")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tiny_llama(vocab_size=256).save_pretrained(folder / "target")
    PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(folder / "target")
    target = TargetModel.from_pretrained(str(folder / "target"))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(folder / "heads", heads, target)
    return folder


def expected(checkpoint: Path, **options: Any) -> str:
    model: Any = TargetModel.from_pretrained(str(checkpoint / "target")).model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint / "target")
    inputs = tokenizer("def f(", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(3)
    out = model.generate(**inputs, max_new_tokens=30, **options)
    text = tokenizer.decode(out[0])
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"do_sample": False}),
        (["--temperature", "0.7"], {"do_sample": True, "temperature": 0.7}),
        (["--top-k", "5"], {"do_sample": True, "top_k": 5}),
    ],
)
def test_streams_the_targets_text(
    checkpoint: Path, flags: list[str], options: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(checkpoint / "heads"), "--prompt", "def f(", "--max-new-tokens", "30"]
    assert main([*base, "--seed", "3", *flags, "--stats"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == expected(checkpoint, **options).rstrip("\n")
    assert "tokens per step" in printed.err


def test_prompt_from_standard_input(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def f("))
    assert main([str(checkpoint / "heads"), "--max-new-tokens", "30"]) == 0
    assert capsys.readouterr().out.startswith("def f(")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere", "--prompt", "x"], "expected a heads checkpoint"),
        (["{}/heads", "--prompt", ""], "the prompt is empty"),
        (["{}/heads", "--prompt", "x", "--target", "nowhere"], "expected a causal language model"),
        (["{}/heads", "--prompt", "x", "--tree", "0"], "tree"),
        (["{}/heads", "--prompt", "x", "--temprature", "1"], "did you mean '--temperature'"),
        (["--prompt", "x"], "--checkpoint is missing"),
    ],
)
def test_mistakes_are_one_sentence(
    checkpoint: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag.format(checkpoint) for flag in flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
