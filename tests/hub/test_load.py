"""Heads and target loaded by their names on a hub, over HTTP; and in transformers by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, dynamic_module_utils

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel, attach
from medusa_heads.checkpoint.adapter import quiet_peft
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.hub.pull import find_checkpoint, pull
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.target.loading import load_tokenizer
from tests.hub.hub_server import LocalHub

INPUTS: dict[str, Any] = {
    "input_ids": torch.arange(3, 15)[None],
    "attention_mask": torch.ones(1, 12).long(),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def commit(hub: LocalHub, checkpoint: Path, target: TargetModel) -> str:
    """alice/heads and alice/target on the hub; the commit of the target that the heads name."""
    folder = Path(target.name_or_path)
    made = hub.upload("alice/target", {path.name: path.read_bytes() for path in folder.iterdir()})
    push(prepare_push(checkpoint, "alice/heads", base_model=f"alice/target@{made}"))
    return made


@pytest.fixture
def expected(target: TargetModel) -> torch.Tensor:
    tokens: torch.Tensor = target.model.generate(**INPUTS, **GREEDY)  # type: ignore[operator]
    return tokens


def test_one_call_finds_heads_and_target(
    hub: LocalHub, commit: str, expected: torch.Tensor
) -> None:
    model = MedusaModel.from_pretrained("alice/heads", dtype="float32", tree=4)
    assert torch.equal(model.generate(**INPUTS, **GREEDY), expected)  # type: ignore[arg-type]
    assert model.last_stats.steps < 24
    assert model.target.name_or_path == "alice/target" and model.target.revision == commit


def test_the_target_is_taken_at_the_revision_the_heads_were_trained_on(
    hub: LocalHub, commit: str, expected: torch.Tensor
) -> None:
    hub.upload("alice/target", {"config.json": b"{}"})  # a later one, which no longer works
    model = MedusaModel.from_pretrained("alice/heads")
    assert torch.equal(model.generate(**INPUTS, **GREEDY), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected a causal language model .* at 'alice/target'"):
        MedusaModel.from_pretrained("alice/heads", target="alice/target")
    pinned = MedusaModel.from_pretrained("alice/heads", target=f"alice/target@{commit}")
    assert pinned.target.revision == commit


def test_another_target_is_refused_with_both_fingerprints(
    hub: LocalHub, commit: str, tiny_llama: Any, target: TargetModel
) -> None:
    other = tiny_llama(vocab_size=24, seed=3)
    with pytest.raises(ValueError, match="these heads were trained for another target") as raised:
        MedusaModel.from_pretrained("alice/heads", target=other)
    for fingerprint in (target.fingerprint(), TargetModel(other).fingerprint()):
        assert fingerprint["lm_head_sha256"] in str(raised.value)


def test_options_reach_the_target(hub: LocalHub, commit: str) -> None:
    model = MedusaModel.from_pretrained(
        "alice/heads",
        dtype=torch.bfloat16,
        device_map="cpu",
        attn_implementation="eager",
        tree="chain",
    )
    assert model.target.dtype == torch.bfloat16
    assert model.target.model.config._attn_implementation == "eager"
    assert model.heads.vocab_matrix(0)[0].dtype == torch.bfloat16


def test_offline_from_a_cache_of_ones_own(hub: LocalHub, commit: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {"cache_dir": tmp_path / "mine", "tree": "chain"}
    MedusaModel.from_pretrained("alice/heads", **where)
    hub.requests.clear()
    MedusaModel.from_pretrained("alice/heads", local_files_only=True, **where)
    assert not hub.requests
    with pytest.raises(ValueError, match="is not in the local cache, and local_files_only"):
        MedusaModel.from_pretrained("alice/heads", local_files_only=True)


def test_a_hub_that_is_gone_is_asked_for_no_file_of_a_target(
    hub: LocalHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for an adapter's configuration either, which most targets have none of: the client would
    try that for half a minute."""
    MedusaModel.from_pretrained("alice/heads")
    hub.requests.clear()
    monkeypatch.setattr("medusa_heads.hub_probe.hub_failure", lambda: "the hub cannot be reached")
    MedusaModel.from_pretrained("alice/heads")
    assert not [path for _, path in hub.requests if "alice/target" in path]
    with pytest.raises(ValueError, match="no tokenizer of 'alice/target' is in the local cache"):
        load_tokenizer("alice/target", revision=commit)


def test_a_target_that_is_gone_is_one_sentence(hub: LocalHub, commit: str) -> None:
    del hub.repositories["alice/target"]
    with pytest.raises(ValueError, match="name it as their target; pass target= ") as raised:
        MedusaModel.from_pretrained("alice/heads")
    assert "\n" not in str(raised.value)


def test_attached_to_a_target_in_memory(
    hub: LocalHub, commit: str, target: TargetModel, expected: torch.Tensor
) -> None:
    for model in (target, target.model):
        by_name = attach(model, "alice/heads", tree=4)
        assert torch.equal(by_name.generate(**INPUTS, **GREEDY), expected)  # type: ignore[arg-type]
        assert by_name.target.model is target.model
    in_memory = attach(target.model, by_name.heads, statistics=by_name.statistics, tree=4)
    assert torch.equal(in_memory.generate(**INPUTS, **GREEDY), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="apply to a target that is loaded here"):
        attach(target, "alice/heads", dtype="auto")


def test_transformers_alone_by_folder_and_by_name(
    hub: LocalHub,
    commit: str,
    expected: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = pull("alice/heads", tmp_path / "pulled")
    target: Any = AutoModelForCausalLM.from_pretrained("alice/target", dtype=torch.float32)
    for name in (str(folder), "alice/heads"):
        for options in (GREEDY, {"max_new_tokens": 24, "do_sample": True}):
            torch.manual_seed(5)
            plain = target.generate(**INPUTS, **options)
            torch.manual_seed(5)
            by_name: Any = {"custom_generate": name, "trust_remote_code": True}
            got = target.generate(**INPUTS, **by_name, rng="transformers", **options)
            assert torch.equal(got, plain)


def test_saved_and_pushed_from_memory(
    hub: LocalHub, commit: str, checkpoint: Path, tmp_path: Path, target: TargetModel
) -> None:
    (checkpoint / "report.md").write_text("# Report\n")
    push(prepare_push(checkpoint, "alice/heads", base_model=f"alice/target@{commit}"))
    model = MedusaModel.from_pretrained(pull("alice/heads", tmp_path / "pulled"), tree="chain")
    saved = model.save_pretrained(tmp_path / "saved")
    for name in ("medusa_lm_head.safetensors", "custom_generate/generate.py", "report.md"):
        assert (saved / name).read_bytes() == (tmp_path / "pulled" / name).read_bytes()
    before, after = (
        json.loads((folder / "medusa_heads.json").read_text())
        for folder in (tmp_path / "pulled", saved)
    )
    assert before == after

    address = model.push_to_hub("alice/again", private=True, commit_message="Again")
    again = hub.repositories["alice/again"]
    assert address.endswith(again.refs["main"]) and again.private
    assert json.loads(again.tree()["medusa_heads.json"]) == before

    # A copy of the target at another place leaves the name that the heads know it by.
    local = MedusaModel.from_pretrained("alice/heads", target=target.name_or_path, tree="chain")
    local.save_pretrained(tmp_path / "local")
    assert json.loads((tmp_path / "local" / "medusa_heads.json").read_text()) == before
    config = json.loads((tmp_path / "local" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "alice/target"


@pytest.mark.slow
def test_a_process_that_is_told_of_the_hub_by_its_environment(
    hub: LocalHub, commit: str, expected: torch.Tensor, tmp_path: Path
) -> None:
    """Nothing of this process's settings: transformers, this package, and HF_ENDPOINT."""
    program = """
import torch
from transformers import AutoModelForCausalLM
from medusa_heads import MedusaModel
inputs = {"input_ids": torch.arange(3, 15)[None], "attention_mask": torch.ones(1, 12).long()}
greedy = {"max_new_tokens": 24, "do_sample": False}
model = MedusaModel.from_pretrained("alice/heads", dtype="float32")
print(model.generate(**inputs, **greedy).tolist())
target = AutoModelForCausalLM.from_pretrained("alice/target", dtype="float32")
heads = {"custom_generate": "alice/heads", "trust_remote_code": True}
print(target.generate(**inputs, **greedy, **heads).tolist())
"""
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    settings["MEDUSA_HEADS_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == 2 * [expected.tolist()]


def test_heads_of_an_adapter_bring_it_along(hub: LocalHub, commit: str, tmp_path: Path) -> None:
    def adapted_target() -> Any:
        base = AutoModelForCausalLM.from_pretrained("alice/target", dtype=torch.float32)
        with quiet_peft():
            model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.2)
        return model.eval()

    adapted = adapted_target()
    view = TargetModel(adapted)
    with quiet_peft():
        save_heads(tmp_path / "joint", fresh_heads(view), view, adapter=adapted)
    push(prepare_push(tmp_path / "joint", "alice/joint"))
    model = MedusaModel.from_pretrained("alice/joint", dtype="float32", tree="chain")
    expected = adapted.generate(**INPUTS, **GREEDY)
    assert torch.equal(model.generate(**INPUTS, **GREEDY), expected)  # type: ignore[arg-type]
    plain: Any = AutoModelForCausalLM.from_pretrained("alice/target", dtype=torch.float32)
    assert not torch.equal(plain.generate(**INPUTS, **GREEDY), expected)
    with pytest.raises(ValueError, match="this target carries no adapter"):
        attach(plain, "alice/joint")
    in_memory = attach(adapted, "alice/joint", tree="chain")
    for each in (model, in_memory):
        saved = each.save_pretrained(tmp_path / "saved")
        for name in ("adapter/adapter_model.safetensors", "medusa_heads.json"):
            assert (saved / name).read_bytes() == (tmp_path / "joint" / name).read_bytes()
    with pytest.raises(ValueError, match="carries an adapter that these heads were not loaded"):
        MedusaModel(adapted, in_memory.heads).save_pretrained(tmp_path / "alone")


def test_fresh_heads_in_memory_are_pushed_by_the_targets_name(
    hub: LocalHub, commit: str, target: TargetModel
) -> None:
    model = MedusaModel(target, fresh_heads(target), tree="chain")
    with pytest.raises(ValueError, match="only as 'secret-target' on this machine"):
        model.push_to_hub("alice/fresh")
    assert "alice/fresh" not in hub.repositories
    model.push_to_hub("alice/fresh", base_model="alice/target")
    assert MedusaModel.from_pretrained(find_checkpoint("alice/fresh")).target.revision == commit


def fresh_heads(target: TargetModel) -> Any:
    return MedusaHeads.from_target(target, HeadsConfig(num_heads=1))
