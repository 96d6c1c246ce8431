"""The sweep over architectures, on five of them: verdicts, the table, and resuming."""

import json
from pathlib import Path

import pytest

from scripts.prove import architecture_check, architectures
from scripts.prove.architecture_check import Result
from scripts.prove.architectures import main
from tests.pairs import with_slow
from tests.training.processes import forked

VERDICTS = {
    "llama": "exact tree",
    "deepseek_v32": "exact tree",  # reads what an indexer chooses
    "bloom": "exact chain",
    "recurrent_gemma": "refused",
    "lfm2": "exact recurrent",  # a hybrid of convolutions and attention
}
NEW = 6
FEW = ["llama", "bloom", "recurrent_gemma"]
TOKENS = {"llama": 9 * NEW, "deepseek_v32": 9 * NEW, "bloom": 2 * NEW, "lfm2": 2 * NEW}


@pytest.fixture(scope="module", params=with_slow([FEW], [list(VERDICTS)]), ids=["three", "all"])
def kinds(request: pytest.FixtureRequest) -> list[str]:
    chosen: list[str] = request.param
    return chosen


@pytest.fixture(scope="module")
def swept(kinds: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By a process that imports torch for itself where all are swept, else by one that need not."""
    folder, context = tmp_path_factory.mktemp("matrix"), forked()
    with pytest.MonkeyPatch.context() as patch:
        if kinds == FEW:
            patch.setattr(architectures.multiprocessing, "get_context", lambda _: context)
        sweep(folder, "--types", *kinds, "--new_tokens", str(NEW))
    return folder


def sweep(folder: Path, *arguments: str) -> None:
    paths = ["--results", str(folder / "rows.jsonl"), "--output", str(folder / "table.md")]
    main([*paths, *arguments])


def test_verdicts(swept: Path, kinds: list[str]) -> None:
    rows = {r["kind"]: r for r in map(json.loads, (swept / "rows.jsonl").read_text().splitlines())}
    assert {kind: row["verdict"] for kind, row in rows.items()} == {k: VERDICTS[k] for k in kinds}
    tokens = {kind: row["tokens"] for kind, row in rows.items() if row["tokens"]}
    assert tokens == {kind: number for kind, number in TOKENS.items() if kind in kinds}
    assert "ALiBi" in rows["bloom"]["note"]
    note = rows["recurrent_gemma"]["note"]  # a state, or in other versions of transformers a text
    assert "does not keep its" in note and "in the cache" in note


def test_table(swept: Path, kinds: list[str]) -> None:
    page = (swept / "table.md").read_text()
    assert f"Of {len(kinds)} types" in page
    assert "- 1 refused" in page and "- 1 exact chain" in page and "- 0 MISMATCH" in page
    tokens = sum(number for kind, number in TOKENS.items() if kind in kinds)
    assert f"{tokens} tokens" in page and "; 0 differed" in page
    assert f"| llama | 2022 | rows | exact tree | {9 * NEW} |" in page
    if kinds != FEW:
        assert "- 1 exact recurrent" in page
        assert f"| deepseek_v32 | 2025 | rows, index | exact tree | {9 * NEW} |" in page
        assert f"| lfm2 | 2025 | rows, state | exact recurrent | {2 * NEW} |  |" in page
    assert "tokens/step" not in page and "ALiBi" in page
    assert "types of" in page and "decode exactly" in page
    assert not list(swept.glob("*.partial"))


def test_a_difference_that_double_precision_does_not_have_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights with which rounding alone moves logits prove nothing."""
    precise = iter([0, 5])  # tokens that differ in double precision, with two weights
    tried: list[bool] = []

    def attempt(kind: str, *_: object) -> Result:
        tried.append(len(tried) % 2 == 1)
        return Result(kind, "MISMATCH", 9, next(precise) if tried[-1] else 5)

    monkeypatch.setattr(architecture_check, "_attempt", attempt)
    assert architecture_check.check("llama", 9).verdict == "MISMATCH"
    assert tried == [False, True] * 2
