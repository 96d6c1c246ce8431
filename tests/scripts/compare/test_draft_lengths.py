"""The script that compares lengths of drafts, on a draft that knows nothing yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.target.target import TargetModel
from medusa_heads.training.runs.pruned_target import begin_draft
from scripts.compare.draft_lengths import main
from tests.conftest import Refused


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.7"]], ids=["greedy", "sampled"])
def test_a_table_for_each_set(
    sampling: list[str], short_demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetModel.from_pretrained(str(short_demo))
    save_draft(tmp_path / "draft", begin_draft(target, num_layers=1), target)
    small = ["--num_prompts", "1", "--prompt_length", "16", "--max_new_tokens", "6"]
    flags = [*small, "--lengths", "1", "3", "--sets", "prose", "numbers", *sampling]
    flags += ["--dtype", "float32"]
    assert main([str(tmp_path / "draft"), *flags]) == 0
    shown = capsys.readouterr().out
    assert "prose, 1 prompts" in shown and "numbers, 1 prompts" in shown
    assert ("sampled drafts" in shown) == bool(sampling)
    # The fastest fixed length is what the others are compared with.
    for table in shown.split("numbers, "):
        fixed = [line.split("│") for line in table.splitlines() if "│" in line]
        ratios = {cells[1].strip(): float(cells[4]) for cells in fixed}
        assert set(ratios) == {"none", "1", "3", "adaptive"}
        assert max(ratios["1"], ratios["3"]) == 1.0


def test_a_mistake_is_one_sentence(refused: Refused) -> None:
    assert "does not name its target" in refused(main, ["nowhere"])
    assert "got ['music']" in refused(main, ["nowhere", "--sets", "code", "music"])
    assert "lengths must be at least 1, got [2, 0]" in refused(main, ["x", "--lengths", "2", "0"])
