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
