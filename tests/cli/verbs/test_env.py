"""`medusa-heads env`: what a report of a bug needs, and nothing that is private."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.cli.main import main
from medusa_heads.cli.verbs.env import USES
from medusa_heads.target import loading
from medusa_heads.target.loading import StoredForm
from tests.conftest import Refused, TinyLlama
from tests.machine.small import SMALL


def test_it_prints_what_a_report_needs(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(cache.parent))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("medusa_heads.machine.products.int8_gain", lambda _: 3.5)
    monkeypatch.setattr("medusa_heads.machine.products.packed_gain", lambda *_: 1.25)
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"torch {version('torch')}" in shown and "transformers " in shown
    for name in ("cpu", "cores", "capability", "ONEDNN_MAX_CPU_ISA", "GOMP_SPINCOUNT", "devices"):
        assert f"\n{name}: " in shown
    for purpose in USES.values():
        assert f"  {purpose}: " in shown
    assert "float32 on 1 thread" in shown
    assert "drafts in eight bits: 3.50 times" in shown
    assert "packed matrices: 1.25 times" in shown
    assert shown.endswith("measurements are kept in ~/cache\n")
    assert "hf_secret" not in shown and str(cache.parent) not in shown
    assert main(["env"]) == 0  # from what was kept


def test_it_measures_by_the_sizes_of_a_target(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", str(checkpoint / "target")]) == 0
    assert "float32 as its weights are stored" in capsys.readouterr().out


def test_a_target_with_code_of_its_own_at_a_revision(
    refused: Refused, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the commands take it whose choices are shown."""
    asked: list[tuple[str, str | None, bool]] = []

    def stored_form(name: str, *, revision: str | None, trust_remote_code: bool) -> Any:
        asked.append((name, revision, trust_remote_code))
        return StoredForm(torch.float32, SMALL) if trust_remote_code else None

    monkeypatch.setattr(loading, "stored_form", stored_form)
    assert main(["env", "user/target@v2", "--trust_remote_code"]) == 0
    assert "float32 as its weights are stored" in capsys.readouterr().out
    assert "needs --trust_remote_code" in refused(main, ["env", "user/target"])
    assert asked == [("user/target", "v2", True), ("user/target", None, False)]


def test_mistakes_are_one_sentence(tmp_path: Path, refused: Refused) -> None:
    def env(flags: list[str]) -> int:
        return main(["env", *flags])

    assert "expected a device such as cpu or cuda, got 'abacus'" in refused(
        env, ["--device", "abacus"]
    )
    assert "expected a causal language model" in refused(env, [str(tmp_path)])


def test_what_is_no_target_to_measure_by_is_named(
    tiny_llama: TinyLlama, tmp_path: Path, refused: Refused
) -> None:
    folder = tmp_path / "target"
    tiny_llama().save_pretrained(folder)
    target = TargetModel.from_pretrained(str(folder))
    save_heads(tmp_path / "heads", MedusaHeads.from_target(target, HeadsConfig()), target)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    for place, said in (
        ("heads", "found heads, which only draft on their target"),
        ("target", "is quantised, of which nothing is measured"),
        ("nowhere", "nowhere', found none"),
    ):
        assert said in refused(main, ["env", str(tmp_path / place)])
