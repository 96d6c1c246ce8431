"""Foreign heads on a hub, over HTTP: found by name, and no more fetched than is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.interop.convert import convert_heads
from medusa_heads.interop.export import export_heads
from tests.hub.hub_server import LocalHub, log_in
from tests.interop import layouts
from tests.interop.layouts import assert_same_bits, native_tensors

ALICE, BOB = "hf_alicealicealice", "hf_bobbobbobbob"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub where alice is logged in."""
    with LocalHub({ALICE: "alice", BOB: "bob"}) as hub:
        log_in(hub, ALICE, tmp_path, monkeypatch)
        yield hub


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fetched(hub: LocalHub) -> set[str]:
    return {path.rsplit("/", 1)[1] for method, path in hub.requests if method == "GET"}


def test_heads_and_target_by_name(hub: LocalHub, tmp_path: Path, target: Path) -> None:
    planted = native_tensors(5)
    old = layouts.fasterdecoding_pt(tmp_path / "old", planted)
    first = hub.upload("bob/old", files_of(old))
    hub.upload("bob/old", files_of(old) | {"config.json": b"{}"})
    at = hub.upload("bob/target", files_of(target))
    converted = convert_heads("bob/old", tmp_path / "out", target="bob/target")
    assert converted.notices == ()  # as of the second commit
    assert converted.stored.target["name_or_path"] == "bob/target"
    assert converted.stored.target["revision"] == at
    assert_same_bits(read_stored(tmp_path / "out").tensors, planted)
    for number, (name, revision) in enumerate([("bob/old", first), (f"bob/old@{first}", None)]):
        out = tmp_path / f"first{number}"
        (notice, _) = convert_heads(name, out, revision=revision).notices
        assert "medusa_num_heads: 2" in notice
    served = export_heads(tmp_path / "out", tmp_path / "tgi", "tgi").folder
    said = json.loads((served / "config.json").read_text())["base_model_name_or_path"]
    assert said == "bob/target"
    # A checkpoint of ours is found by name as well, and its matrix where its target is.
    own = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    hub.upload("bob/heads", own)
    by_name = export_heads("bob/heads", tmp_path / "modelopt", "modelopt").folder
    assert (by_name / "model-00002-of-00002.safetensors").is_file()
    with pytest.raises(ValueError, match="of this package already"):
        convert_heads("bob/heads", tmp_path / "no")


def test_of_a_merged_model_only_the_shards_with_heads_and_lm_head(
    hub: LocalHub, tmp_path: Path, target: Path
) -> None:
    planted = native_tensors(2)
    parts = {
        "layers": load_file(target / "model.safetensors"),
        "heads": {f"medusa_head.{name}": tensor for name, tensor in planted.items()},
    }
    parts["lm_head"] = {"lm_head.weight": parts["layers"].pop("lm_head.weight")}
    folder = tmp_path / "merged"
    layouts.write_config(folder, json.loads((target / "config.json").read_text()))
    weight_map: dict[str, str] = {}
    for part, tensors in parts.items():
        save_file(tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    commit = hub.upload("bob/merged", files_of(folder))
    converted = convert_heads("bob/merged", tmp_path / "out")
    assert_same_bits(read_stored(tmp_path / "out").tensors, planted)
    named = converted.stored.target
    assert (named["name_or_path"], named["revision"]) == ("bob/merged", commit)
    assert {"heads.safetensors", "lm_head.safetensors"} <= fetched(hub)
    assert "layers.safetensors" not in fetched(hub)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bob/none", "no repository 'bob/none', or it is private"),
        ("bob/private", "no repository 'bob/private', or it is private"),
        ("bob/old@v9", "'bob/old' has no revision 'v9'"),
        ("bob/empty", "'bob/empty' holds no weights"),
        ("bob/cut", "cannot be read"),
        ("a/b/c", "found none"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    hub: LocalHub, tmp_path: Path, name: str, message: str
) -> None:
    old = files_of(layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2)))
    hub.upload("bob/old", old)
    hub.upload("bob/private", old, private=True)
    hub.upload("bob/empty", {"config.json": b"{}"})
    hub.upload("bob/cut", old | {"medusa_lm_head.pt": old["medusa_lm_head.pt"][:-500]})
    with pytest.raises(ValueError, match=message) as error:
        convert_heads(name, tmp_path / "out")
    assert "\n" not in str(error.value) and ALICE not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_hub_that_fails_midway_is_not_taken_for_an_empty_one(
    hub: LocalHub, tmp_path: Path
) -> None:
    old = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2))
    hub.upload("bob/old", files_of(old))

    def fail(method: str, path: str) -> None:
        if "medusa_lm_head" in path:
            raise ConnectionResetError

    with (
        hub.interfering(fail),
        pytest.raises(ValueError, match=r"^the hub at http://127\.0\.0\.1.* 'bob/old'"),
    ):
        convert_heads("bob/old", tmp_path / "out")


def test_an_index_of_a_repository_cannot_lead_out_of_it(hub: LocalHub, tmp_path: Path) -> None:
    index = {"weight_map": {"medusa_head.0.0.linear.weight": "../../secret.safetensors"}}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    hub.upload("bob/evil", files)
    with pytest.raises(ValueError, match="outside its folder"):
        convert_heads("bob/evil", tmp_path / "out")


@pytest.mark.parametrize("why", ["the hub cannot be reached", "the hub is switched off by HF_HUB"])
def test_a_hub_that_cannot_be_asked(
    why: str, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would try each file for half a minute; and what was not downloaded earlier is not
    what a repository lacks."""
    hub.upload("bob/old", files_of(layouts.fasterdecoding_v2(tmp_path / "old", native_tensors(2))))
    convert_heads("bob/old", tmp_path / "first")
    hub.requests.clear()
    if "switched off" in why:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr("medusa_heads.interop.source.hub_failure", lambda: why)
    convert_heads("bob/old", tmp_path / "second")
    with pytest.raises(ValueError, match=f"of 'bob/none' are in the local cache, and {why}"):
        convert_heads("bob/none", tmp_path / "third")
    assert not hub.requests
