"""Targets that speak single characters, with fresh heads, for the verbs that decode."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.cli.verbs import chat
from medusa_heads.trees.statistics import HeadStatistics
from tests.conftest import TinyLlama

SPACE_AND_NEWLINE = ["\u0120", "\u010a"]  # as byte-level tokenizers write them


def save_pair(
    folder: Path, pieces: list[str], tiny_llama: TinyLlama, statistics: HeadStatistics | None
) -> Path:
    """A tiny Llama over these pieces in `folder/target`, fresh heads in `folder/heads`."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tiny_llama(vocab_size=len(pieces)).save_pretrained(folder / "target")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "target")
    target = TargetModel.from_pretrained(str(folder / "target"))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(folder / "heads", heads, target, statistics=statistics)
    return folder


Talk = Callable[..., Any]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Chat with a checkpoint, or with other first arguments: what these lines have printed."""

    def run(given: Path | list[str], lines: list[str], *flags: str, limit: int = 24) -> Any:
        first = given if isinstance(given, list) else [str(given)]
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        assert chat.main([*first, "--max-new-tokens", str(limit), *flags]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def checkpoint(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces are all bytes: characters beyond ASCII take several tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    return save_pair(tmp_path_factory.mktemp("bytes"), pieces, tiny_llama, None)


@pytest.fixture(scope="session")
def speaker(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces are ASCII characters without brackets; the heads carry statistics."""
    pieces = [chr(code) for code in range(33, 127) if chr(code) not in "[]"]
    ranks_SK = torch.randint(12, (400, 2), generator=torch.Generator().manual_seed(0))
    statistics = HeadStatistics.from_ranks(ranks_SK)
    folder = tmp_path_factory.mktemp("ascii")
    return save_pair(folder, [*pieces, *SPACE_AND_NEWLINE], tiny_llama, statistics)
