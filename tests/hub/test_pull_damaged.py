"""What a repository holds in part, or damaged, is not pulled: least of all over whole heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_heads.checkpoint.files import ADAPTER_FOLDER, WEIGHTS_FILE
from medusa_heads.contents import SIDECAR_FILE
from medusa_heads.hub.pull import pull
from medusa_heads.hub.push import prepare_push, push
from tests.hub.hub_api import Refusal
from tests.hub.hub_server import LocalHub
from tests.hub.test_pull import contents
from tests.pairs import alternately

SAID = {
    "missing": "safetensors', found none",
    "cut": "cannot be read",
    "flipped": "its checksum differs",
    "without its adapter": "found no adapter_config.json",
}


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


@pytest.mark.parametrize(("damage", "overwrite"), alternately(SAID, (True, False)))
def test_damaged_heads_take_no_place(
    damage: str, overwrite: bool, hub: LocalHub, checkpoint: Path, tmp_path: Path
) -> None:
    push(prepare_push(checkpoint, "alice/heads"))
    out = tmp_path / "out"
    if overwrite:
        pull("alice/heads", out)
    before = contents(out)
    tree = dict(hub.repositories["alice/heads"].tree())
    if damage == "missing":
        del tree[WEIGHTS_FILE]
    elif damage == "without its adapter":
        adapted = {"adapter": {"folder": ADAPTER_FOLDER, "sha256": "0" * 64}}
        tree[SIDECAR_FILE] = json.dumps(json.loads(tree[SIDECAR_FILE]) | adapted).encode()
    else:
        damaged = {"cut": lambda data: data[:-7], "flipped": flipped}[damage]
        tree[WEIGHTS_FILE] = damaged(tree[WEIGHTS_FILE])
    hub.upload("bob/damaged", tree)
    with pytest.raises(ValueError, match=SAID[damage]):
        pull("bob/damaged", out, overwrite=overwrite)
    assert contents(out) == before and out.exists() == overwrite


def test_a_token_that_may_not_read(hub: LocalHub, checkpoint: Path, tmp_path: Path) -> None:
    """As one of fine grain, which was made for other repositories."""
    push(prepare_push(checkpoint, "alice/heads"))

    def refuse(method: str, path: str) -> None:
        raise Refusal(403, "Ask for the right to read")

    with (
        hub.interfering(refuse),
        pytest.raises(ValueError, match=r"token may not read 'alice/heads' \(Ask for the right"),
    ):
        pull("alice/heads", tmp_path / "out")
