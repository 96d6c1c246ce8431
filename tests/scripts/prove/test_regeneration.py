"""The proof of regeneration in small: a client that dies twice, and a server on a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from scripts.prove.answering import TARGET
from scripts.prove.regeneration import compare, main, spoil
from tests.conftest import Refused


def test_rows_that_are_spoilt_are_found(tmp_path: Path) -> None:
    corpus = tmp_path / "few.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": f"x{n} = "}) + "\n" for n in range(20)))
    tokenizer: Any = AutoTokenizer.from_pretrained(str(TARGET))
    asked = [tokenizer(f"x{n} = ")["input_ids"] for n in range(20)]
    rows = Dataset.from_dict(
        {
            "input_ids": [[*ids, 5, 6] for ids in asked],
            "labels": [[-100] * len(ids) + [5, 6] for ids in asked],
        }
    )
    assert compare(corpus, rows, rows) == []
    spoilt = list(spoil(rows))
    assert len(spoilt) > 2
    for name, other in spoilt:
        assert compare(corpus, rows, other), name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--prompts", "0"], "prompts must be at least 100, got 0"),
        (["--kills", "-1"], "kills must be at least 0, got -1"),
        (["--real_every", "0"], "real_every must be at least 1, got 0"),
        (["--prompt", "300"], "did you mean '--prompts'?"),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(
    flags: list[str], sentence: str, tmp_path: Path, refused: Refused
) -> None:
    assert sentence in refused(main, ["--out", str(tmp_path), *flags])


def test_what_lies_in_the_folder_of_the_proof_is_not_removed(
    tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "thesis.txt").write_text("a")
    assert "holds other files" in refused(main, ["--out", str(tmp_path)])
    assert (tmp_path / "thesis.txt").read_text() == "a"


@pytest.mark.slow
def test_a_client_that_is_killed_twice_asks_every_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--prompts", "300", "--kills", "2", "--real_every", "150", "--out", str(out)]
    assert main(flags) == 0
    report = json.loads((out / "report.json").read_text())
    killed, alone = report["runs"]["killed"], report["runs"]["all"]
    assert (killed["kills"], alone["kills"]) == (2, 0) and len(killed["peaks"]) == 3
    assert killed["accounting"]["reused"] > 0 and killed["real"] > 0
    assert killed["accounting"] == alone["accounting"] | {"reused": killed["accounting"]["reused"]}
    assert 300 < killed["requests"] < 300 + 3 * (2 * 16 + 1)  # what was at hand is asked again
