"""A card that somebody wrote on the hub, and a folder that has none: which of them stays."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from medusa_heads.errors import MedusaWarning
from medusa_heads.hub.card import MARK
from medusa_heads.hub.push import prepare_push, push
from tests.hub.hub_api import Refusal
from tests.hub.hub_server import LocalHub

CARD = "README.md"
KEPT = r"README.md of 'alice/heads' was written by hand and stays as it is: remove it there"


def put(hub: LocalHub, card: bytes) -> None:
    """Write the card on the hub's own page."""
    repository = hub.repositories["alice/heads"]
    repository.commit("main", {**repository.tree(), CARD: card}, "By hand")


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_card_that_was_edited_on_the_hub_stays(
    hub: LocalHub, checkpoint: Path, create_pr: bool
) -> None:
    prepared = prepare_push(checkpoint, "alice/heads")
    push(prepared)
    repository = hub.repositories["alice/heads"]
    generated = repository.tree()[CARD]
    mine = generated.replace(f"{MARK}\n".encode(), b"") + b"\nMy own words.\n"
    put(hub, mine)
    sidecar = checkpoint / "medusa_heads.json"
    sidecar.write_text(sidecar.read_text().replace("train-heads", "calibrate"))
    with pytest.warns(MedusaWarning, match=KEPT):
        push(prepare_push(checkpoint, "alice/heads"), create_pr=create_pr)
    tree = repository.tree("refs/pr/1" if create_pr else "main")
    assert tree[CARD] == mine and b"calibrate" in tree["medusa_heads.json"]


@pytest.mark.parametrize("card", [b"---\nlicense: mit\n---\n", b"Heads.\n", b"caf\xe9\n"])
def test_a_card_that_was_made_on_the_hub_stays(
    hub: LocalHub, checkpoint: Path, card: bytes
) -> None:
    hub.upload("alice/heads", {CARD: card})
    with pytest.warns(MedusaWarning, match=KEPT):
        push(prepare_push(checkpoint, "alice/heads"))
    tree = hub.repositories["alice/heads"].tree()
    assert tree[CARD] == card and "medusa_lm_head.safetensors" in tree


def test_a_generated_or_empty_card_is_made_anew(hub: LocalHub, checkpoint: Path) -> None:
    hub.upload("alice/heads", {CARD: b"---\n---\n\n"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", MedusaWarning)
        push(prepare_push(checkpoint, "alice/heads"))
        assert MARK.encode() in hub.repositories["alice/heads"].tree()[CARD]
        put(hub, f"{MARK}\nOf an earlier push.\n".encode())
        push(prepare_push(checkpoint, "alice/heads"))
        assert b"Of an earlier push" not in hub.repositories["alice/heads"].tree()[CARD]
        put(hub, b"Mine.\n")
        (checkpoint / CARD).write_text("Mine, too.\n")  # the folder's own goes before the hub's
        push(prepare_push(checkpoint, "alice/heads"))
        assert hub.repositories["alice/heads"].tree()[CARD] == b"Mine, too.\n"


def test_a_card_that_cannot_be_read_is_not_written_over(hub: LocalHub, checkpoint: Path) -> None:
    hub.upload("alice/heads", {CARD: b"Mine.\n"})

    def refuse(method: str, path: str) -> None:
        if path.endswith(CARD):
            raise Refusal(418, "I am a teapot")

    with hub.interfering(refuse), pytest.raises(ValueError, match=r"answered 418 for 'alice/heads"):
        push(prepare_push(checkpoint, "alice/heads"))
    assert hub.repositories["alice/heads"].tree() == {CARD: b"Mine.\n"}
