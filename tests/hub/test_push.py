"""Pushing to a hub, over HTTP: what is uploaded, what is refused, what an interruption leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import close_session
from safetensors.torch import save_file

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.hub_probe import asking_hub
from tests.hub.conftest import ALICE, BOB
from tests.hub.hub_api import Refusal
from tests.hub.hub_server import LocalHub

NAMES = {
    "medusa_heads.json",
    "medusa_lm_head.safetensors",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "README.md",
}


def test_only_the_checkpoints_own_files_in_one_commit(hub: LocalHub, checkpoint: Path) -> None:
    address = push(prepare_push(checkpoint, "alice/heads"), commit_message="First heads")
    repository = hub.repositories["alice/heads"]
    tree = repository.tree()
    assert set(tree) == NAMES | {".gitattributes"}
    for name in NAMES - {"README.md"}:
        assert tree[name] == (checkpoint / name).read_bytes()
    assert list(repository.messages.values()) == ["initial commit", "First heads"]
    assert address == f"{hub.url}/alice/heads/commit/{repository.refs['main']}"
    assert not repository.private
    assert not (checkpoint / "README.md").exists()  # the folder stays as it was


def test_pushed_again_it_is_updated_and_what_is_no_longer_goes(
    hub: LocalHub, checkpoint: Path, target: TargetModel
) -> None:
    push(prepare_push(checkpoint, "alice/heads"))
    repository = hub.repositories["alice/heads"]
    before = repository.refs["main"]
    push(prepare_push(checkpoint, "alice/heads"))
    assert repository.refs["main"] == before  # nothing new, no commit
    repository.commit("main", {**repository.tree(), "LICENSE": b"of alice"}, "By hand")

    own = MedusaHeads.from_target(target, HeadsConfig(num_heads=1, vocab_matrix="own"))
    save_heads(checkpoint, own, target)
    push(prepare_push(checkpoint, "alice/heads", base_model="alice/target"))
    tree = repository.tree()
    assert set(tree) == NAMES | {".gitattributes", "LICENSE"}
    weights = (checkpoint / "medusa_lm_head.safetensors").read_bytes()
    assert tree["medusa_lm_head.safetensors"] == weights
    assert len(repository.commits) == 4


def test_the_targets_matrix_is_published_only_where_it_is_asked_for(
    checkpoint: Path, target: TargetModel
) -> None:
    """Folders had a copy by default once."""
    name = "vocab_matrix.safetensors"
    with pytest.raises(ValueError, match=r"publishes vocab_matrix.safetensors, and .* has none"):
        prepare_push(checkpoint, "alice/heads", with_vocab_matrix=True)
    matrix = target.get_output_embeddings().weight.detach()
    save_file({"lm_heads.0.weight": matrix}, checkpoint / name)
    prepared = prepare_push(checkpoint, "alice/heads")
    assert name not in prepared.files
    card = prepared.files["README.md"]
    assert isinstance(card, bytes) and b"medusa-heads export alice/heads" in card
    prepared = prepare_push(checkpoint, "alice/heads", with_vocab_matrix=True)
    assert prepared.files[name] == checkpoint / name
    save_file({"secret.weight": matrix}, checkpoint / name)
    with pytest.raises(ValueError, match=r"must hold lm_heads.0.weight of shape \[24, 64\] alone"):
        prepare_push(checkpoint, "alice/heads", with_vocab_matrix=True)


def test_private_branch_and_proposal(hub: LocalHub, checkpoint: Path) -> None:
    prepared = prepare_push(checkpoint, "alice/heads")
    push(prepared, private=True)
    repository = hub.repositories["alice/heads"]
    first = repository.refs["main"]
    assert repository.private

    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    prepared = prepare_push(checkpoint, "alice/heads")
    push(prepared, revision="v2")
    assert repository.refs["main"] == first
    assert repository.tree("v2")["README.md"].endswith(b"Mine.\n")
    address = push(prepared, create_pr=True)
    assert address == f"{hub.url}/alice/heads/discussions/1"
    assert repository.refs["main"] == first and "refs/pr/1" in repository.refs

    hub.repositories["alice/heads"].private = False
    with pytest.raises(ValueError, match="'alice/heads' exists and is public"):
        push(prepared, private=True, revision="v3")
    assert "v3" not in repository.refs
    with pytest.raises(ValueError, match="expected a branch, tag or commit, got ''"):
        push(prepared, revision="")
    # Bob may propose, but not write.
    assert "discussions/2" in push(prepared, create_pr=True, token=BOB)
    assert repository.refs["main"] == first


def test_who_may_not_push_is_told_so(hub: LocalHub, checkpoint: Path) -> None:
    prepared = prepare_push(checkpoint, "alice/heads")
    with pytest.raises(ValueError, match=r"the token may not write to 'alice/heads' \(You don't"):
        push(prepared, token=BOB)
    push(prepared)
    with pytest.raises(ValueError, match="the token may not write to 'alice/heads'"):
        push(prepared, token=BOB)
    with pytest.raises(ValueError, match="the hub does not know this token: log in"):
        push(prepared, token="hf_nobodynobody")
    with pytest.raises(ValueError, match="the hub has no repository 'alice/none'"):
        push(prepare_push(checkpoint, "alice/none"), create_pr=True)
    for unusable in ("hf_with space", "", "hf_with\nline", "h\u00e9"):
        with pytest.raises(ValueError, match="the token given is not one of a hub") as raised:
            push(prepared, token=unusable)
        assert not unusable or unusable not in str(raised.value)


def test_without_a_token_no_hub_is_asked(
    hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(checkpoint / "none"))
    with pytest.raises(ValueError, match="nobody push without a token: log in with `hf auth"):
        push(prepare_push(checkpoint, "alice/heads"))
    assert hub.requests == []


def test_no_network(hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_push(checkpoint, "alice/heads")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the hub at http://127.0.0.1:9 cannot be reached for"):
        push(prepared)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        push(prepared)


@pytest.mark.parametrize("proxy", ["gopher://me:hunter2@x:1", "socks5://me:hunter2@x:1"])
def test_a_client_that_cannot_be_made(
    proxy: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    # Of the HTTP library's optional packages; without it a proxy of that kind is an ImportError.
    monkeypatch.setitem(sys.modules, "socksio", None)
    close_session()
    try:
        monkeypatch.setenv("HF_TOKEN", ALICE)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ValueError, match=r"the hub at http\S+ cannot be asked for") as raised:
            push(prepare_push(checkpoint, "alice/heads"))
        assert "hunter2" not in str(raised.value)
        with asking_hub("alice/target") as options:
            assert options == {"local_files_only": True}
    finally:
        monkeypatch.undo()
        close_session()


def test_what_a_server_says_never_brings_the_token_to_light(
    hub: LocalHub, checkpoint: Path
) -> None:
    def gossip(method: str, path: str) -> None:
        raise Refusal(418, f"I know you, {ALICE}")

    with hub.interfering(gossip), pytest.raises(ValueError) as raised:
        push(prepare_push(checkpoint, "alice/heads"))
    assert str(raised.value) == "the hub answered 418 for 'alice/heads' (I know you, ***)"
    assert raised.value.__suppress_context__ and raised.value.__cause__ is None


@pytest.mark.parametrize("at", ["/commit/", "/lfs/", "/preupload/"])
def test_a_cut_connection_leaves_the_old_heads(
    hub: LocalHub, checkpoint: Path, target: TargetModel, at: str
) -> None:
    push(prepare_push(checkpoint, "alice/heads"))
    repository = hub.repositories["alice/heads"]
    old = repository.refs["main"]
    save_heads(checkpoint, MedusaHeads.from_target(target, HeadsConfig(num_heads=3)), target)
    prepared = prepare_push(checkpoint, "alice/heads", base_model="alice/target")

    def refuse(method: str, path: str) -> None:
        if at in path:
            raise Refusal(507, "The disk is full")

    def cut(method: str, path: str) -> None:
        if at in path:
            raise RuntimeError("cut")

    # Only the commit is tried once; what comes before is repeated for half a minute.
    with hub.interfering(cut if at == "/commit/" else refuse), pytest.raises(ValueError):
        push(prepared)
    assert repository.refs["main"] == old
    push(prepared)
    config = json.loads(repository.tree()["medusa_heads.json"])["heads"]
    assert config["num_heads"] == 3 and len(repository.commits) == 3


@pytest.mark.slow
def test_a_killed_push_leaves_the_old_heads(hub: LocalHub, checkpoint: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if path.startswith("/lfs/"):
            reached.set()
            go_on.wait(60)
            raise RuntimeError("nobody listens any more")

    program = [sys.executable, "-m", "medusa_heads.cli.main", "push", str(checkpoint)]
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with hub.interfering(hold):
        process = subprocess.Popen([*program, "alice/heads"], env={**os.environ, **settings})
        try:
            assert reached.wait(120), "the upload never began"
        finally:
            process.kill()
            process.wait()
            go_on.set()
    repository = hub.repositories["alice/heads"]
    assert set(repository.tree()) == {".gitattributes"}
    push(prepare_push(checkpoint, "alice/heads"))
    assert set(repository.tree()) == NAMES | {".gitattributes"}


def test_a_push_beside_another_does_not_mix_with_it(hub: LocalHub, checkpoint: Path) -> None:
    push(prepare_push(checkpoint, "alice/heads"))
    repository = hub.repositories["alice/heads"]
    (checkpoint / "README.md").write_text("another card")

    def somebody_else(method: str, path: str) -> None:
        if "/commit/" in path:
            repository.commit("main", {"medusa_heads.json": b"{}"}, "Meanwhile")

    with (
        hub.interfering(somebody_else),
        pytest.raises(ValueError, match="was changed by someone else meanwhile"),
    ):
        push(prepare_push(checkpoint, "alice/heads"))
    assert list(repository.tree()) == ["medusa_heads.json"]


def test_another_models_repository_is_left_alone(hub: LocalHub, checkpoint: Path) -> None:
    hub.upload("alice/llama", {"config.json": b"{}", "model.safetensors": b"1"})
    with pytest.raises(ValueError, match=r"holds another model \(model.safetensors\)"):
        push(prepare_push(checkpoint, "alice/llama"))
    assert hub.repositories["alice/llama"].tree()["config.json"] == b"{}"
    # Heads of older projects are replaced.
    hub.upload("alice/old", {"config.json": b"{}", "medusa_lm_head.pt": b"1"})
    push(prepare_push(checkpoint, "alice/old"))
    assert "medusa_lm_head.pt" in hub.repositories["alice/old"].tree()


def test_damaged_heads_are_not_published(hub: LocalHub, checkpoint: Path) -> None:
    weights = checkpoint / "medusa_lm_head.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match="its checksum differs"):
        prepare_push(checkpoint, "alice/heads")
    with pytest.raises(ValueError, match="expected a heads checkpoint"):
        prepare_push(checkpoint / "checkpoint-8", "alice/heads")


def test_a_home_may_be_written_short(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    prepared = prepare_push(f"~/{checkpoint.name}", "alice/heads")
    assert prepared == prepare_push(checkpoint, "alice/heads")
    missing = f"~/{checkpoint.name}/none.json"
    with pytest.raises(ValueError, match=f"JSON file at '{checkpoint}/none.json', found none"):
        prepare_push(checkpoint, "alice/heads", benchmark=missing)


@pytest.mark.parametrize(("revision", "known"), [("0" * 40, True), (None, False)])
def test_a_name_without_a_user_is_the_hubs_only_where_it_came_from_there(
    checkpoint: Path, revision: str | None, known: bool
) -> None:
    file = checkpoint / "medusa_heads.json"
    sidecar = json.loads(file.read_text())
    sidecar["target"] |= {"name_or_path": "gpt2", "revision": revision}
    file.write_text(json.dumps(sidecar))
    if known:
        assert b"base_model: gpt2" in prepare_push(checkpoint, "alice/heads").files["README.md"]  # type: ignore[operator]
    else:
        with pytest.raises(ValueError, match="only as 'gpt2' on this machine"):
            prepare_push(checkpoint, "alice/heads")
