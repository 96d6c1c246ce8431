"""The comparison of joint training with heads alone runs from text to table."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from scripts.compare.joint import main


@pytest.mark.slow
def test_a_recipe_is_trained_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = [(7 * i + 3) % 4096 for i in range(192)]
    rows = {"input_ids": text, "labels": [-100] * 64 + text[64:]}
    for name in ("text", "held_out"):
        Dataset.from_list([rows] * 4).save_to_disk(tmp_path / name)
    given = ["--recipes", "kl", "--num_prompts", "4", "--num_eval_prompts", "4"]
    given += ["--text", str(tmp_path / "text"), "--held_out", str(tmp_path / "held_out")]
    main([*given, "--num_decoded", "1", "--output_dir", str(tmp_path)])
    (joint,) = json.loads((tmp_path / "joint.json").read_text())
    # One step, whose rate is 0: the target still predicts what it did.
    assert joint["loss"] == pytest.approx(joint["loss_before"], rel=1e-3)
    assert min(joint["tokens_per_step"].values()) >= 1
    assert (tmp_path / "kl" / "adapter").is_dir()
    assert "joint: KL + 0.2 heads" in capsys.readouterr().out
