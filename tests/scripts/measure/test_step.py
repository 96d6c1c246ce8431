"""The profile of a step: its parts add up, and the target is left as it was."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.target.attention import take_tree_masks
from scripts.measure.step import main
from scripts.measure.step_timers import PHASES, generation
from tests.conftest import Refused, TinyLlama
from tests.inference.on_device import with_heads
from tests.inference.speaking import save_speaker

QUICK = ["--tree", "4", "--new_tokens", "6", "--repeats", "2", "--dtype", "float32"]


def test_random_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "profile.json"
    take_tree_masks()  # else that of the first target would stay
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    flags = ["--random_target", "32x2x4x2", "--vocabulary", "300", "--contexts", "16", "40", *QUICK]
    assert main([*flags, "--draft_vocab_size", "50", "--output", str(output)]) == 0
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention
    report = json.loads(output.read_text())
    assert report["nodes"] == 5 and report["machine"]["load_average_after"]
    assert [row["context"] for row in report["contexts"]] == [16, 40]
    for row in report["contexts"]:
        times = row["milliseconds"]
        assert all(value > 0 for value in times.values())
        # One turn is left after the warming up, so that medians are that turn's values.
        assert sum(times[phase] for phase in PHASES) == pytest.approx(times["step"])
        assert row["outside_target"] == pytest.approx(1 - times["target"] / times["step"])
        assert 1 <= row["tokens_per_step"] <= 5
        plain = min(times["plain_no_mask"], times["plain_mask"])
        assert row["speedup"] == pytest.approx(row["tokens_per_step"] * plain / times["step"])
        assert row["agreed"] == 1.0
    first, last = report["contexts"]
    assert first["beyond_attention_growth"] == 1.0 != last["beyond_attention_growth"]
    assert report["draft_vocab_size"] == 50
    shown = capsys.readouterr().out
    assert "outside the target's forward" in shown and "5 nodes" in shown


def test_checkpoint_and_contexts_cut_to_what_fits(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    target = TargetModel.from_pretrained(str(save_speaker(tmp_path / "target", tiny_llama)))
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2, prefix_attention=True))
    save_heads(tmp_path / "heads", heads, target)
    output = tmp_path / "profile.json"
    flags = ["--checkpoint", str(tmp_path / "heads"), "--contexts", "8", "4096", "9000", *QUICK]
    assert main([*flags, "--output", str(output)]) == 0
    contexts = [row["context"] for row in json.loads(output.read_text())["contexts"]]
    assert contexts == [8, 512 - 6 - 5]


def test_steps_that_are_one_graph(tiny_llama: TinyLlama) -> None:
    medusa, ids_1T = with_heads(tiny_llama(num_layers=1)), torch.arange(9)[None]
    cache = DynamicCache(config=medusa.target.config)
    with medusa.target.uncompiled():  # type: ignore[attr-defined]
        times, tokens = generation(medusa, ids_1T, cache, 6)
    assert len(tokens) == 6 and times["graph"] > 0
    assert sum(times[phase] for phase in ("draft", "graph", "walk", "rest")) == pytest.approx(
        times["step"]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either --checkpoint or --random_target"),
        (["--checkpoint", "nowhere"], "expected a heads checkpoint"),
        (["--random_target", "64x2"], "expected WIDTHxLAYERSxHEADS"),
        (["--random_target", "64x2x4", "--shape", "1b"], "give --shape with --checkpoint"),
        (["--random_target", "64x2x7"], "do not divide the width evenly"),
        (["--random_target", "64x2x4", "--repeats", "1"], "at least 2 repeats and tokens"),
        (["--random_target", "64x2x4", "--contexts", "0"], "contexts of at least 1"),
        (["--random_target", "64x2x4", "--dtype", "int8"], "expected dtype float32"),
        (["--checkpoint", "nowhere", "--dtype", "int8"], "expected dtype float32"),
        (["--random_targt", "64x2x4"], "did you mean '--random_target'"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], message: str, refused: Refused) -> None:
    assert message in refused(main, flags)
