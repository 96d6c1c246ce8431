"""The script that measures a draft model, on a draft that knows nothing yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.pruned_target import begin_draft
from scripts.measure.draft import main
from tests.conftest import Refused


@pytest.mark.slow
def test_tables_of_all_methods(
    short_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetModel.from_pretrained(str(short_demo))
    save_draft(tmp_path, begin_draft(target, num_layers=1), target)
    small = ["--num_prompts", "2", "--prompt_length", "16", "--max_new_tokens", "6"]
    more = ["--dtype", "float32", "--trees", "chain:2", "dynamic:6"]
    assert main([str(tmp_path), *small, *more]) == 0
    shown = capsys.readouterr().out
    for name in ("greedy", "sampled", "chain:2", "dynamic:6", "transformers assisted"):
        assert name in shown
    lines = [line for line in shown.splitlines() if "chain:2" in line or "dynamic:6" in line]
    assert len(lines) == 4 and all("2 of 2" in line for line in lines)


def test_a_mistake_is_one_sentence(refused: Refused) -> None:
    assert "does not name its target" in refused(main, ["nowhere"])
