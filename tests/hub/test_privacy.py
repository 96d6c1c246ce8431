"""What is published says nothing of the machine it was made on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_heads import HeadsConfig, MedusaHeads, TargetModel
from medusa_heads.checkpoint.checkpoint import save_heads
from medusa_heads.hub.published import without_paths
from medusa_heads.hub.push import prepare_push


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/my runs/target", "target"),
        ("--output_dir=/home/me/my runs/x", "--output_dir=x"),
        ("../secret/data.jsonl", "data.jsonl"),
        ("~/data/a.jsonl", "a.jsonl"),
        ("~me/a.jsonl", "a.jsonl"),
        ("C:\\Users\\me\\x", "x"),
        ("file:///home/me/x", "x"),
        ("see /home/me/a.txt, and [/b/c]", "see a.txt, and [c]"),
        ("# heads for /home/me/t\n| `/b/c` |", "# heads for t\n| `c` |"),
        ("--hub_token hf_abcdefghijkl", "--hub_token ***"),
        ("http://me:pass@host/v1", "http://***@host/v1"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        ("user/model", "user/model"),
        ("configs/demo.yaml", "configs/demo.yaml"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("1/2 and/or 3", "1/2 and/or 3"),
        ("heads of /home/me/Acme Corp/secret/heads", "heads of heads"),
        ("of /home/me/My Docs/a secret/b x, user/model", "of b x, user/model"),
        ("of /home/me/Acme and Sons/secret/x", "of Acme and x"),
        ("| /mnt/Acme Corp/a.jsonl | trl-lib/Capybara |", "| a.jsonl | trl-lib/Capybara |"),
        ("at /home/me/a\nof user/model", "at a\nof user/model"),
        ("/home/me/a ../b/c ~/d/e", "e"),
        ("at /home/me/a ../b/c ~/d/e", "at a c e"),
        ("target:/home/me/x and me@host:/home/me/y", "target:x and me@host:y"),
        ("localhost:8000/v1", "localhost:8000/v1"),
        ("\\\\server\\me\\share\\x", "x"),
        ("at \\\\server\\me\\x y\\z, a", "at z, a"),
        ("--out=\\\\server\\me", "--out=me"),
        ("at C:\\me\\x C:\\me\\y file:///home/me/z", "at x y z"),
        ("at /home/me/x: 3 tokens/s", "at x: 3 tokens/s"),
    ],
)
def test_paths_are_cut_down(text: str, expected: str) -> None:
    assert without_paths(text) == expected
    assert without_paths({"a": [text, 1, None], text: True}) == {
        "a": [expected, 1, None],
        expected: True,
    }


def test_a_name_is_exchanged_where_it_stands_alone() -> None:
    text = "assets/t, assets/t-2, my/assets/t"
    assert without_paths(text, ("assets/t", "a/b")) == "a/b, assets/t-2, my/assets/t"


@pytest.fixture
def local(target: TargetModel, tmp_path: Path) -> Path:
    """Heads of a target in a folder, with a story full of paths."""
    story: dict[str, Any] = {
        "argv": ["/home/alice/bin/train-heads", "--output_dir=/mnt/alice/run", "configs/a.yaml"],
        "data": {"dataset": ["/home/alice/private.jsonl", "data/more.jsonl", "trl-lib/Capybara"]},
    }
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    folder = save_heads(tmp_path / "run", heads, target, provenance=story)
    (folder / "report.md").write_text(f"# 2 medusa heads for {target.name_or_path}\n")
    return folder


def test_a_target_that_is_only_here_is_refused_without_naming_where(local: Path) -> None:
    with pytest.raises(ValueError, match="only as 'secret-target' on this machine") as raised:
        prepare_push(local, "alice/heads")
    assert "--base_model user/name" in str(raised.value)
    assert "models" not in str(raised.value)
    for wrong in ("target", "/a/b", "a/b/c", "alice/target/"):
        with pytest.raises(ValueError, match="expected the name of a repository as user/name"):
            prepare_push(local, "alice/heads", base_model=wrong)


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("gpt2; rm -rf ~ #", "main"),
        ("gpt2`\n\n# Other heads", "main"),
        ("alice/target", 'x"); import os; os.system("id'),
        ("alice/target", "main`"),
    ],
)
def test_no_program_of_a_card_says_what_a_stranger_wrote(
    local: Path, name: str, revision: str
) -> None:
    """Heads that came from elsewhere are pushed on, with a card in one's own name."""
    file = local / "medusa_heads.json"
    sidecar = json.loads(file.read_text())
    sidecar["target"] |= {"name_or_path": name, "revision": revision}
    file.write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="where nobody else finds it"):
        prepare_push(local, "alice/heads")


def test_no_path_of_this_machine_is_in_any_file(local: Path, target: TargetModel) -> None:
    prepared = prepare_push(local, "alice/heads", base_model="alice/target@v1")
    contents = {
        name: what if isinstance(what, bytes) else what.read_bytes()
        for name, what in prepared.files.items()
    }
    here = Path(target.name_or_path)
    for name, content in contents.items():
        for part in (here, "secret-target", here.parents[2], "/home/alice", "/mnt", local.parent):
            assert str(part).encode() not in content, (name, part)
    sidecar = json.loads(contents["medusa_heads.json"])
    assert sidecar["target"]["name_or_path"] == "alice/target"
    assert sidecar["target"]["revision"] == "v1"
    assert json.loads(contents["config.json"])["base_model_name_or_path"] == "alice/target"
    assert sidecar["provenance"] == {"data": {"dataset": ["local data", "trl-lib/Capybara"]}}
    card = contents["README.md"].decode()
    assert "base_model: alice/target" in card and "datasets:\n- trl-lib/Capybara\n" in card
    assert contents["report.md"] == b"# 2 medusa heads for alice/target\n"
    assert (
        sidecar["weights_sha256"]
        == json.loads((local / "medusa_heads.json").read_text())["weights_sha256"]
    )


def test_a_path_that_looks_like_a_hub_id_is_known_for_one(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.model.save_pretrained(tmp_path / "assets" / "target")
    monkeypatch.chdir(tmp_path)
    here = TargetModel.from_pretrained("assets/target")
    save_heads("run", MedusaHeads.from_target(here, HeadsConfig(num_heads=1)), here)
    with pytest.raises(ValueError, match="only as 'target' on this machine"):
        prepare_push("run", "alice/heads")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="only as 'target' on this machine"):
        prepare_push("../run", "alice/heads")
