"""`medusa-heads benchmark`: it runs, and mistakes are one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.checkpoint.stored_heads import SIDECAR_FILE
from medusa_heads.cli.verbs.benchmark import main
from medusa_heads.inference.bench import run
from medusa_heads.machine import choice
from tests.conftest import Refused

SMALL = ["--num-prompts", "1", "--prompt-length", "8", "--max-new-tokens", "4", "--tree", "2"]

REMOTE = """\
from transformers import LlamaConfig, LlamaForCausalLM

class RemoteConfig(LlamaConfig):
    model_type = "remote_llama"

class RemoteModel(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def test_a_target_with_code_of_its_own(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "target"
    shutil.copytree(checkpoint / "target", folder)
    (folder / "remote.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "remote_llama",
        "auto_map": {
            "AutoConfig": "remote.RemoteConfig",
            "AutoModelForCausalLM": "remote.RemoteModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    target = TargetModel.from_pretrained(str(folder), trust_remote_code=True)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    save_heads(tmp_path / "heads", heads, target)
    command = [str(tmp_path / "heads"), "--dtypes", "float32", *SMALL]
    assert main([*command, "--target", str(folder), "--trust-remote-code"]) == 0
    assert "heads:2" in capsys.readouterr().out
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "contains custom code which must be executed" in told.splitlines()[-1]
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("abacus", "expected a device such as cpu or cuda, got 'abacus'"),
        ("meta", "the device 'meta' cannot be used here ("),
        ("cuda:99", "the device 'cuda:99' cannot be used here ("),
    ],
)
def test_a_device_that_is_not_there(
    checkpoint: Path, device: str, sentence: str, refused: Refused
) -> None:
    told = refused(main, [str(checkpoint / "heads"), "--device", device, *SMALL])
    assert sentence in told


def test_what_is_measured_is_on_the_device_that_was_chosen(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual one may have no room for the weights."""
    choose = choice.choose

    def elsewhere(*given: Any, **options: Any) -> Any:
        return replace(choose(*given, **options), device=torch.device("cuda", 7))

    def measured(*_: Any, device: str, **__: Any) -> None:
        raise ValueError(f"it was {device}")

    monkeypatch.setattr(choice, "choose", elsewhere)
    monkeypatch.setattr(run, "benchmark", measured)
    for given, device in (([], "cuda:7"), (["--dtypes", "float32"], "cpu")):
        assert main([str(checkpoint / "heads"), *given, *SMALL]) == 2
        assert capsys.readouterr().err.endswith(f"it was {device}\n")


@pytest.mark.parametrize("target", [None, {"name_or_path": ""}])
def test_a_sidecar_that_names_no_target(
    checkpoint: Path, tmp_path: Path, target: object, refused: Refused
) -> None:
    shutil.copytree(checkpoint / "heads", tmp_path / "heads")
    sidecar = json.loads((tmp_path / "heads" / SIDECAR_FILE).read_text())
    (tmp_path / "heads" / SIDECAR_FILE).write_text(json.dumps(sidecar | {"target": target}))
    said = "no 'target' part" if target is None else "does not name its target"
    assert said in refused(main, [str(tmp_path / "heads"), *SMALL])


def test_a_target_alone_on_questions(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question_id": 1, "category": "math", "turns": ["1 + 1?", "And 2 + 2?"]},
        {"question_id": 2, "category": "math", "turns": ["too long " * 9]},
        {"question_id": 3, "category": "writing", "turns": ["A poem."]},
    ]
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [str(checkpoint / "target"), "--methods", "plain", "transformers-prompt-lookup"]
    shutil.copytree(checkpoint / "target", tmp_path / "draft")
    drafts = [str(checkpoint / "target"), str(tmp_path / "draft")]  # the better one drafts
    command += ["draft-model:chain:2", "--draft_model", *drafts]
    command += ["--prompts", str(tmp_path / "question.jsonl"), "--max_prompt_length", "40"]
    command += ["--dtypes", "float32", "--decodings", "greedy", "--batch_sizes", "1", "2"]
    command += ["--max_new_tokens", "4", "--num_prompts", "0", "--report", str(tmp_path / "out")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "speed-up by category" in shown and "draft-model:chain:2" in shown
    assert "asked for: 1 prompts" in shown
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    one, two = report["settings"]
    assert (one["batch_size"], one["prompts"]) == (1, 3)  # two turns of the first question
    assert (two["batch_size"], two["prompts"]) == (2, 2)  # one is left over
    assert list(one["methods"][0]["by_category"]) == ["math", "writing"]
    assert all(method["identical"] == 1.0 for s in (one, two) for method in s["methods"])
    assert (tmp_path / "out" / "report.md").read_text().startswith("# Benchmark")


def test_what_is_given_is_measured_by_default(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text("to be continued")
    given = ["--draft_model", str(checkpoint / "target"), "--corpus", str(tmp_path / "corpus.txt")]
    few = ["--dtypes", "float32", "--decodings", "greedy", "--report", str(tmp_path)]
    assert main([str(checkpoint / "target"), *given, *few, *SMALL[:-2]]) == 0
    (setting,) = json.loads((tmp_path / "report.json").read_text())["settings"]
    names = [method["name"] for method in setting["methods"]]
    lookup = "transformers-prompt-lookup"
    assert names == ["plain", lookup, "auto", "auto+corpus", "draft-model"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--methods", "plain", "heds"], "expected methods among plain, plain-compiled"),
        (
            ["--methods", "plain", "heads:4"],
            "needs a heads checkpoint, and the target has come alone",
        ),
        (["--methods", "draft-model"], "needs a draft model: give --draft_model"),
        (["--methods", "plain", "--draft_model", "x"], "methods plain drafts with it: name draft-"),
        (["--methods", "suffix", "--tree", "8"], "a tree is of the method heads, where that names"),
        (["--tree", "8"], "and it is not among the methods: name it, or leave --tree out"),
        (["--seed", str(2**64)], f"seed must be a number of 64 bits, got {2**64}"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--batch_sizes", "0"], "batch_sizes must be at least 1, got [0]"),
        (["--decodings", "beam"], "expected decodings among greedy, sampled, got 'beam'"),
        (["--num_prompts", "0"], "num_prompts must be at least 1, got 0"),
        (["--prompts", "x", "--num_prompts", "-1"], "num_prompts must be at least 0, got -1"),
        (["--max_prompt_length", "9"], "max_prompt_length is for prompts of your own"),
        (["--prompts", "x", "--prompt_length", "9"], "prompt_length is that of the default"),
        (["--report", ""], "expected a folder, got an empty name"),
        (["--target", "other"], "leave out --target"),
        (["--prompts", "nowhere.jsonl"], "expected a file of prompts at 'nowhere.jsonl'"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], sentence: str, checkpoint: Path, refused: Refused
) -> None:
    assert sentence in refused(main, [str(checkpoint / "target"), *flags])
