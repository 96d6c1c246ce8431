"""Pulling from a hub, over HTTP: bitwise what was pushed, at a revision, and nothing beside it."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.checkpoint.files import OWN_FILES
from medusa_heads.hub.pull import copy_checkpoint, find_checkpoint, pull
from medusa_heads.hub.push import prepare_push, push
from tests.hub.conftest import BOB
from tests.hub.hub_api import Handler, Refusal
from tests.hub.hub_server import LocalHub
from tests.killed import dies


@pytest.fixture
def pushed(hub: LocalHub, checkpoint: Path) -> Path:
    push(prepare_push(checkpoint, "alice/heads"))
    return checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_bitwise_what_was_pushed(
    hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = hub.repositories["alice/heads"].tree()
    own = {name: data for name, data in tree.items() if name != ".gitattributes"}
    folder = pull("alice/heads", tmp_path / "new" / "pulled")
    assert contents(folder) == own
    assert all(not path.is_symlink() for path in folder.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert pull("alice/heads") == Path("heads") and contents(Path("heads")) == own
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("overwrite", [pytest.param(False, marks=pytest.mark.slow), True])
def test_wherever_it_is_killed_the_next_pull_brings_all(
    overwrite: bool, hub: LocalHub, pushed: Path, tmp_path: Path
) -> None:
    own = contents(pull("alice/heads", tmp_path / "whole"))
    out = tmp_path / "out"
    for renames in count():
        shutil.rmtree(out, ignore_errors=True)
        if overwrite:
            shutil.copytree(tmp_path / "whole", out)
        if not dies(lambda: pull("alice/heads", out, overwrite=overwrite), renames=renames):
            break
        assert contents(pull("alice/heads", out, overwrite=overwrite)) == own
        assert not list(tmp_path.rglob(".*.part"))
    assert renames > 2


def test_a_revision(hub: LocalHub, pushed: Path, tmp_path: Path) -> None:
    repository = hub.repositories["alice/heads"]
    first = repository.refs["main"]
    card = repository.tree()["README.md"]
    repository.commit("main", {**repository.tree(), "README.md": b"later"}, "Later")
    assert contents(pull("alice/heads", tmp_path / "a"))["README.md"] == b"later"
    assert contents(pull("alice/heads", tmp_path / "b", revision=first))["README.md"] == card
    assert contents(pull(f"alice/heads@{first}", tmp_path / "c"))["README.md"] == card
    assert find_checkpoint("alice/heads", revision=first).name == first
    with pytest.raises(ValueError, match="'alice/heads' has no revision 'v9'"):
        pull("alice/heads", tmp_path / "d", revision="v9")
    with pytest.raises(ValueError, match="got two revisions, 'v1' and 'v2'"):
        find_checkpoint("alice/heads@v1", revision="v2")
    assert not (tmp_path / "d").exists()


def test_a_folder_in_use_is_not_written_over(hub: LocalHub, pushed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is in use: pull into another folder"):
        pull("alice/heads", out, overwrite=True)
    with pytest.raises(ValueError, match="is in use: pull into another folder"):
        pull("alice/heads", out / "none" / "..")
    (out / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(out)
    inode = out.stat().st_ino
    assert pull("alice/heads", tmp_path / "link").is_symlink()
    assert out.stat().st_ino == inode and not (out / "none").exists()
    (out / "notes.txt").write_text("mine")
    (out / "accuracy.png").write_text("of the heads before")
    with pytest.raises(ValueError, match=r"in use: overwrite it \(--overwrite\), or pull into"):
        pull("alice/heads", out)
    pull("alice/heads", out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine" and not (out / "accuracy.png").exists()


def test_heads_lie_beside_other_files_and_over_none(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("report.md", "README.md"):
        (checkpoint / name).write_text("of the heads")
    mine = {"notes.txt": b"mine", "src/report.md": b"mine"}
    out = tmp_path / "project"
    (out / "src").mkdir(parents=True)
    for name, content in mine.items():
        (out / name).write_bytes(content)
    own = ("config.json", "report.md", "accuracy.png", "README.md", "custom_generate/generate.py")
    (out / "custom_generate").mkdir()
    for name in own:  # of which the heads have no picture: it would go with the next heads
        (out / name).write_bytes(b"[1]")
        before = contents(out)
        with pytest.raises(ValueError, match=rf"project' .*names that heads use \({name}\): name"):
            copy_checkpoint(checkpoint, out)
        assert contents(out) == before
        (out / name).unlink()
    (out / "custom_generate").rmdir()
    copy_checkpoint(checkpoint, out)
    (out / "accuracy.png").write_text("of the heads before")
    copy_checkpoint(checkpoint, out)
    assert contents(out) == contents(copied(checkpoint, tmp_path / "alone")) | mine
    (checkpoint / "README.md").unlink()
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "README.md").write_text("mine")
    copy_checkpoint(checkpoint, tmp_path / "described")
    assert (tmp_path / "described" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft_model.json"])
def test_a_folder_of_a_model_is_left_alone(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("{}")
    before = contents(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"holds a model \({name}\): name another folder"):
        copy_checkpoint(checkpoint, tmp_path / "model")
    assert contents(tmp_path / "model") == before


def copied(checkpoint: Path, folder: Path) -> Path:
    copy_checkpoint(checkpoint, folder)
    return folder


def test_loading_downloads_what_it_reads_and_once(hub: LocalHub, pushed: Path) -> None:
    folder = find_checkpoint("alice/heads")
    assert set(contents(folder)) == {"medusa_heads.json", "medusa_lm_head.safetensors"}
    hub.requests.clear()
    assert find_checkpoint("alice/heads") == folder
    assert find_checkpoint("alice/heads", local_files_only=True) == folder
    assert not [path for _, path in hub.requests if "/resolve/" in path]


def test_a_cache_of_the_users_own(hub: LocalHub, pushed: Path, tmp_path: Path) -> None:
    assert find_checkpoint("alice/heads", cache_dir=tmp_path / "mine").is_relative_to(
        tmp_path / "mine"
    )


def test_private_heads_are_for_who_may_read_them(
    hub: LocalHub, pushed: Path, tmp_path: Path
) -> None:
    hub.repositories["alice/heads"].private = True
    for token in (BOB, False):
        with pytest.raises(ValueError, match="no repository 'alice/heads', or it is private"):
            pull("alice/heads", tmp_path / "out", token=token)
    with pytest.raises(ValueError, match="the hub does not know this token"):
        pull("alice/heads", tmp_path / "out", token="hf_nobodynobody")
    assert pull("alice/heads", tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("alice/none", r"at 'alice/none': there is no such folder, and the hub has no repository"),
        ("alice/llama", "'alice/llama' holds no heads of this package"),
        ("none", "expected a heads checkpoint .* at 'none', found none"),
        ("a/b/c", "expected a heads checkpoint"),
        ("./alice/heads", "expected a heads checkpoint"),
        ("alice/heads@", "expected a heads checkpoint"),
    ],
)
def test_what_is_not_there_is_one_sentence(hub: LocalHub, name: str, sentence: str) -> None:
    hub.upload("alice/llama", {"config.json": b"{}", "medusa_lm_head.pt": b"\x80"})
    with pytest.raises(ValueError, match=sentence) as raised:
        find_checkpoint(name)
    assert "\n" not in str(raised.value)


def test_no_network(
    hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = find_checkpoint("alice/heads")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_checkpoint("alice/heads") == kept  # what was downloaded serves
    with pytest.raises(ValueError, match=r"the hub at http://127\.0\.0\.1:9 cannot be"):
        pull("alice/other", tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="not in the local cache, and HF_HUB_OFFLINE is set"):
        pull("alice/other", tmp_path / "out")


def test_pulling_asks_the_hub_and_does_not_hand_out_what_was_downloaded_once(
    hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("alice/heads", tmp_path / "out")

    def fails(method: str, path: str) -> None:
        raise Refusal(403, "Access to it is restricted", "GatedRepo")

    before = contents(tmp_path / "out")
    with hub.interfering(fails), pytest.raises(ValueError, match="must be asked for on its page"):
        pull("alice/heads", tmp_path / "out", overwrite=True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://me:secret@127.0.0.1:9")
    sentence = r"the hub at http://\*\*\*@127\.0\.0\.1:9 cannot be reached"
    with pytest.raises(ValueError, match=sentence):
        pull("alice/heads", tmp_path / "out", overwrite=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # then it may
    pull("alice/heads", tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_home_and_no_revision(
    hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert pull("alice/heads", "~/heads") == tmp_path / "home" / "heads"
    with pytest.raises(ValueError, match="expected a branch, tag or commit, got ''"):
        pull("alice/heads", tmp_path / "out", revision="")


def test_an_empty_name_is_not_where_one_is(
    hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="expected a folder, got an empty name"):
        pull("alice/heads", "")
    assert not list(Path().iterdir())


def test_a_revision_of_a_folder_is_refused(checkpoint: Path) -> None:
    assert find_checkpoint(checkpoint) == checkpoint
    with pytest.raises(ValueError, match="leave it out"):
        find_checkpoint(checkpoint, revision="main")


def test_nothing_is_written_outside_the_folder(hub: LocalHub, pushed: Path, tmp_path: Path) -> None:
    """A stranger's repository may list whatever names it likes."""
    repository = hub.repositories["alice/heads"]
    evil: dict[str, Any] = {
        "../../../evil.json": b"1",
        "adapter/../../../../evil.json": b"1",
        "/tmp/evil.json": b"1",
        "pickle.pt": b"1",
        "custom_generate/more.py": b"1",
    }
    repository.commit("main", {**repository.tree(), **evil}, "Evil")
    folder = pull("alice/heads", tmp_path / "out")
    assert set(contents(folder)) <= set(OWN_FILES)
    written = [path.name for path in tmp_path.rglob("*")]
    assert not {"evil.json", "pickle.pt", "more.py"} & set(written)


LISTINGS = [
    b"7",
    b"null",
    b"{}",
    b'{"id": "alice/heads"}',
    b'{"id": "alice/heads", "siblings": [5]}',
]


@pytest.mark.parametrize("said", LISTINGS, ids=str)
def test_an_answer_of_another_form_is_one_sentence(
    said: bytes, hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = [("GET", "/api/models/.*", lambda *_: (200, said))]
    monkeypatch.setattr("tests.hub.hub_api._ROUTES", routes)
    with pytest.raises(ValueError, match="'alice/heads'") as raised:
        pull("alice/heads", tmp_path / "out")
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag", "X-Repo-Commit"])
def test_a_hub_cannot_choose_where_a_download_lies(
    header: str, hub: LocalHub, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client calls files of its cache by what these headers say."""
    evil = tmp_path / "evil"
    send = Handler._send

    def tampered(self: Handler, status: int, content: Any, headers: Any = None) -> None:
        send(self, status, content, {**(headers or {}), header: f'"{evil}"'})

    monkeypatch.setattr(Handler, "_send", tampered)
    with pytest.raises(ValueError, match="is not to be trusted with 'alice/heads'"):
        pull("alice/heads", tmp_path / "out")
    assert not list(tmp_path.glob("evil*")) and not (tmp_path / "out").exists()
