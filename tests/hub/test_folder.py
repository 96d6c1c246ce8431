"""What is pushed, saved or pulled is the checkpoint: no link out of it, nobody else's program."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.checkpoint.files import KEPT_FILES
from medusa_heads.hub import folder as folder_module
from medusa_heads.hub.pull import find_checkpoint, pull
from medusa_heads.hub.push import prepare_push, push
from medusa_heads.target.fingerprint import file_sha256
from tests.hub.hub_server import LocalHub

SECRET = "of the machine alone"
EVIL = "raise SystemExit('the code of a stranger')\n"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "report.md").write_text(SECRET)
    return tmp_path / "private"


@pytest.mark.parametrize("name", ["report.md", "README.md", "accuracy.png", "report.json"])
def test_links_out_of_the_folder_are_refused(
    checkpoint: Path, outside: Path, target: TargetModel, name: str, tmp_path: Path
) -> None:
    model = MedusaModel.from_pretrained(checkpoint, target=target, tree="none")
    for to in (outside / "report.md", Path("../private/report.md"), Path("/dev/null")):
        (checkpoint / name).symlink_to(to)
        for use in (
            lambda: prepare_push(checkpoint, "alice/heads"),
            lambda: model.save_pretrained(tmp_path / "saved"),
            lambda: model.push_to_hub("alice/heads", base_model="alice/target"),
        ):
            with pytest.raises(ValueError, match="leads out of the checkpoint folder") as raised:
                use()
            assert name in str(raised.value)
        (checkpoint / name).unlink()
    assert not (tmp_path / "saved").exists()


def test_a_link_to_itself_is_refused(checkpoint: Path) -> None:
    (checkpoint / "report.md").symlink_to(checkpoint / "report.md")
    with pytest.raises(ValueError, match=r"report\.md', found something else: remove it"):
        prepare_push(checkpoint, "alice/heads")


def test_a_linked_folder_is_refused(
    checkpoint: Path, outside: Path, target: TargetModel, hub: LocalHub, tmp_path: Path
) -> None:
    push(prepare_push(checkpoint, "alice/heads"))
    for name in ("adapter_config.json", "generate.py"):
        (outside / name).write_text(SECRET)
    shutil.rmtree(checkpoint / "custom_generate")
    for name in ("adapter", "custom_generate"):
        (checkpoint / name).symlink_to(outside)
        if name == "adapter":
            with pytest.raises(ValueError, match="leads out of the checkpoint folder"):
                prepare_push(checkpoint, "alice/heads")
        # What is written there would lie elsewhere.
        with pytest.raises(ValueError, match="found a link: remove it"):
            pull("alice/heads", checkpoint, overwrite=True)
        (checkpoint / name).unlink()
    assert {path.name for path in outside.iterdir()} == {
        *("adapter_config.json", "generate.py", "report.md")
    }
    assert (outside / "generate.py").read_text() == SECRET


def test_links_within_the_folder_and_to_it_are_files(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "notes.md").write_text("# Report\n")
    (checkpoint / "report.md").symlink_to("notes.md")
    (tmp_path / "link").symlink_to(checkpoint)
    assert "report.md" in prepare_push(tmp_path / "link", "alice/heads").files


def test_what_is_no_file_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        with pytest.raises(ValueError) as raised:
            prepare_push(checkpoint, "alice/heads")
        assert "\n" not in str(raised.value)
        return str(raised.value)

    report = checkpoint / "report.md"
    os.mkfifo(report)  # reading it would wait for ever
    assert "found something else: remove it" in refusal()
    report.unlink()
    monkeypatch.chdir(checkpoint)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("report.md")
        assert "found something else: remove it" in refusal()
    report.unlink()
    report.mkdir()
    assert "found something else: remove it" in refusal()
    report.rmdir()
    report.symlink_to("nowhere.md")
    assert "found something else: remove it" in refusal()
    report.unlink()
    (checkpoint / "accuracy.png").write_text(SECRET)
    assert "expected a picture" in refusal()
    (checkpoint / "accuracy.png").unlink()
    report.write_bytes(b"\xff\xfe")
    assert "expected text" in refusal()
    monkeypatch.setattr(folder_module, "MAX_REPORT_BYTES", 10_000)
    report.write_text("x" * 10_001)
    assert "larger than a report can be (10,001 bytes)" in refusal()


def test_nothing_rides_along_in_the_weights(checkpoint: Path) -> None:
    file, sidecar = checkpoint / "medusa_lm_head.safetensors", checkpoint / "medusa_heads.json"
    save_file(load_file(file), file, metadata={"format": "pt", "note": SECRET})
    content = json.loads(sidecar.read_text()) | {"weights_sha256": file_sha256(file)}
    sidecar.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"holds notes beside its tensors \('note'\)"):
        prepare_push(checkpoint, "alice/heads")


def test_an_adapter_that_is_none_of_the_heads_stays_at_home(checkpoint: Path) -> None:
    (checkpoint / "adapter").mkdir()
    (checkpoint / "adapter" / "adapter_config.json").write_text(f'{{"note": "{SECRET}"}}')
    (checkpoint / "adapter" / "adapter_model.safetensors").write_text(SECRET)
    assert not any("adapter" in name for name in prepare_push(checkpoint, "alice/heads").files)


def test_nobody_elses_program_is_pushed_or_pulled(
    hub: LocalHub, checkpoint: Path, tmp_path: Path
) -> None:
    ours = {path.name: path.read_bytes() for path in (checkpoint / "custom_generate").iterdir()}
    for name in ("generate.py", "requirements.txt", "more.py"):
        (checkpoint / "custom_generate" / name).write_text(EVIL)
    push(prepare_push(checkpoint, "alice/heads"))
    repository = hub.repositories["alice/heads"]
    tree = repository.tree()
    pushed = {Path(name).name: data for name, data in tree.items() if "custom_generate/" in name}
    assert pushed == ours

    evil: dict[str, Any] = {f"custom_generate/{name}": EVIL.encode() for name in ours}
    repository.commit("main", {**tree, **evil}, "Evil")
    for folder in (pull("alice/heads", tmp_path / "pulled"), find_checkpoint("alice/heads")):
        for path in folder.rglob("*"):
            assert path.is_dir() or EVIL.encode() not in path.read_bytes()
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "pulled" / "custom_generate").iterdir()
    } == ours


def test_files_of_the_hubs_cache_are_a_checkpoints(
    hub: LocalHub, checkpoint: Path, outside: Path
) -> None:
    """They are links into the cache's own folder; others there are links like any."""
    (checkpoint / "report.md").write_text("# Report\n")
    push(prepare_push(checkpoint, "alice/heads"))
    cached = Path(snapshot_download("alice/heads"))
    assert (cached / "report.md").is_symlink()
    assert set(prepare_push(cached, "alice/again").files) >= {"report.md", "medusa_heads.json"}
    (cached / "accuracy.png").symlink_to(outside / "report.md")
    with pytest.raises(ValueError, match="leads out of the checkpoint folder"):
        prepare_push(cached, "alice/again")
    blobs = cached.parent.parent / "blobs"
    blobs.rename(outside / "blobs")
    blobs.symlink_to(outside / "blobs")
    with pytest.raises(ValueError, match="leads out of the checkpoint folder"):
        prepare_push(cached, "alice/again")


def test_only_these_files_are_a_checkpoints(checkpoint: Path) -> None:
    (checkpoint / "dump.bin").write_bytes(b"0" * 10_000)
    (checkpoint / "данные.json").write_text(SECRET)
    assert set(prepare_push(checkpoint, "alice/heads").files) <= {
        *KEPT_FILES,
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
