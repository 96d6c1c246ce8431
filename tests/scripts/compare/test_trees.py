"""The comparison of trees: every way on the same batches, held to plain generate()'s text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.trees.statistics import HeadStatistics
from scripts.compare.trees import PLAIN, main
from tests.conftest import Refused


@pytest.fixture(scope="module")
def heads(short_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    target = TargetModel.from_pretrained(str(short_demo))
    fresh = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    ranks_SK = torch.randint(6, (200, 2), generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("compare") / "heads"
    return str(save_heads(folder, fresh, target, statistics=HeadStatistics.from_ranks(ranks_SK)))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["1", "3"])
def test_report(heads: str, batch_size: str, tmp_path: Path) -> None:
    output = tmp_path / "trees.json"
    flags = [
        "--checkpoint",
        heads,
        "--trees",
        "auto",
        "none",
        "static:3",
        "--batch_size",
        batch_size,
    ]
    small = ["--num_batches", "2", "--prompt_length", "12", "--max_new_tokens", "6"]
    assert main([*flags, *small, "--dtype", "float32", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert list(report["ways"]) == [PLAIN, "auto", "none", "static:3"]
    assert report["expected_fastest"] in report["sizes"]
    for name, way in report["ways"].items():
        assert way["tokens_per_second"] > 0 and way["auto_over_this"] > 0
        assert name == PLAIN or way["same_rows"] == 2 * int(batch_size)
    assert report["ways"][PLAIN]["tokens_per_step"] == 1.0 == report["ways"][PLAIN]["speedup"]
    assert report["ways"]["none"]["tokens_per_step"] == 1.0


def test_another_text_is_an_error(
    heads: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate = MedusaModel.generate

    def altered(self: MedusaModel, *args: object, **kwargs: object) -> torch.Tensor:
        tokens = generate(self, *args, **kwargs)  # type: ignore[arg-type]
        assert isinstance(tokens, torch.Tensor)
        return tokens.index_fill(1, torch.tensor([-1]), 0)

    monkeypatch.setattr(MedusaModel, "generate", altered)
    flags = ["--checkpoint", heads, "--trees", "none", "--num_batches", "1"]
    small = ["--prompt_length", "12", "--max_new_tokens", "6", "--dtype", "float32"]
    assert main([*flags, *small, "--output", str(tmp_path / "trees.json")]) == 2
    assert "another text than transformers' generate()" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--checkpoint is missing"),
        (["--checkpoint", "nowhere"], "expected a heads checkpoint"),
        (["--checkpoint", "nowhere", "--dtype", "int8"], "expected dtype float32"),
        (["--checkpoint", "nowhere", "--batch_size", "0"], "expected batches"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], message: str, refused: Refused) -> None:
    assert message in refused(main, flags)
