"""The sweep over architectures, on four of them: verdicts, the table, and resuming."""

import json
import re
from pathlib import Path

import pytest

from scripts.prove.architectures import main

VERDICTS = {
    "llama": "exact tree",
    "bloom": "exact chain",
    "mamba": "refused",
    "lfm2": "exact recurrent",  # a hybrid of convolutions and attention
}
TOKENS = {"llama": 9 * 40, "bloom": 2 * 40, "lfm2": 2 * 40}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    sweep(folder, "--types", *VERDICTS, "--new_tokens", "40")
    return folder


def sweep(folder: Path, *arguments: str) -> None:
    paths = ["--results", str(folder / "rows.jsonl"), "--output", str(folder / "table.md")]
    main([*paths, *arguments])


def test_verdicts(swept: Path) -> None:
    rows = {r["kind"]: r for r in map(json.loads, (swept / "rows.jsonl").read_text().splitlines())}
    assert {kind: row["verdict"] for kind, row in rows.items()} == VERDICTS
    assert {kind: row["tokens"] for kind, row in rows.items() if row["tokens"]} == TOKENS
    assert "ALiBi" in rows["bloom"]["note"]
    assert "does not keep its text in the cache" in rows["mamba"]["note"]


def test_table(swept: Path) -> None:
    page = (swept / "table.md").read_text()
    assert "Of 4 types" in page
    assert "- 1 refused" in page and "- 1 exact recurrent" in page and "- 0 MISMATCH" in page
    assert f"{sum(TOKENS.values())} tokens" in page and "; 0 differed" in page
    assert re.search(r"\| llama \| \d{4} \| rows \| exact tree \| 360 \|", page)
    assert not list(swept.glob("*.partial"))
