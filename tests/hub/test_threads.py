"""What is changed at the hub's client holds while any thread asks, and no longer."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import pytest
from huggingface_hub import constants, get_session

from medusa_heads.data.finding import _offline
from medusa_heads.hub.talking import _check_names, in_one_sentence
from medusa_heads.hub_probe import asking_hub
from tests.hub.hub_server import LocalHub


def state() -> tuple[int, list[Any]]:
    return logging.getLogger("huggingface_hub").level, list(get_session().event_hooks["response"])


@pytest.mark.parametrize("first", [0, 1])
def test_without_network_a_hub_is_asked_again_when_all_are_done(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    threads = [ExitStack(), ExitStack()]
    for one in threads:
        one.enter_context(_offline())
    threads[first].close()
    assert constants.HF_HUB_OFFLINE
    threads[1 - first].close()
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_ends_first_leaves_the_other_watched(first: int, hub: LocalHub) -> None:
    before = state()
    threads = [ExitStack(), ExitStack()]
    for one in threads:
        one.enter_context(in_one_sentence("alice/heads"))
        one.enter_context(asking_hub("alice/target"))
    threads[first].close()
    level, hooks = state()
    assert level == logging.ERROR and hooks.count(_check_names) == 1
    threads[1 - first].close()
    assert state() == before
