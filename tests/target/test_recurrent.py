"""Caches of targets with a recurrent state: what is held, put back and refused."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from medusa_heads.target.cache import RowCache
from medusa_heads.target.recurrent import (
    RecurrentCache,
    StateAndRowLayer,
    StateLayer,
)
from medusa_heads.target.scans import time_steps_of_one_token
from medusa_heads.target.target import TargetModel
from scripts.prove.tiny_models import builder
from tests.conftest import TinyLlama
from tests.inference.recurrent import KINDS
from tests.pairs import with_slow

IDS = torch.arange(5, 29)[None]


def target(kind: str) -> TargetModel:
    view = TargetModel(builder(kind)((0.15, 0.15)))
    view.freeze()
    return view


def read(view: TargetModel, ids_1T: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        given = {view.cache_argument: cache, "use_cache": True}
        logits: Tensor = view.model(ids_1T, **given).logits
    return logits


def test_which_targets_have_one(tiny_llama: TinyLlama) -> None:
    assert type(TargetModel(tiny_llama()).new_cache()) is RowCache
    kinds = {"lfm2": StateLayer, "falcon_h1": StateAndRowLayer}
    for kind, layer in kinds.items():
        cache = target(kind).new_cache()
        assert type(cache) is RecurrentCache and not cache.can_go_back
        assert {type(each) for each in cache.layers if isinstance(each, StateLayer)} == {layer}


@pytest.mark.parametrize("kind", ["lfm2", "falcon_h1", "qwen3_next"])
def test_what_was_held_is_put_back_as_often_as_drafts_are_refused(kind: str) -> None:
    view = target(kind)
    cache = view.new_cache(1, 64)
    assert isinstance(cache, RecurrentCache)
    read(view, IDS[:, :12], cache)
    own = DynamicCache(config=view.model.config)
    read(view, IDS[:, :12], own)
    expected = read(view, IDS[:, 12:18], own)
    for refused in (IDS[:, 3:7], IDS[:, 1:2], IDS[:, 2:12]):
        cache.hold()
        read(view, refused, cache)
        cache.put_back()
        cache.set_length(12)
    torch.testing.assert_close(read(view, IDS[:, 12:18], cache), expected)
    cache.move_on()
    cache.hold()  # anew, where the text stands now
    read(view, IDS[:, 3:7], cache)
    cache.put_back()
    cache.set_length(18)
    torch.testing.assert_close(read(view, IDS[:, 18:], cache), read(view, IDS[:, 18:], own))


def test_an_empty_cache_is_taken_over_and_no_other() -> None:
    view = target("lfm2")
    given, cache = DynamicCache(config=view.model.config), view.new_cache()
    cache.take_over(given)
    assert cache.get_seq_length() == 0
    read(view, IDS, given)
    with pytest.raises(ValueError, match="pass the whole text without a cache"):
        cache.take_over(given)


def test_limits_of_time_steps_are_back_behind_the_block() -> None:
    view = target("nemotron_h")
    limited: list[Any] = [m for m in view.model.modules() if hasattr(m, "time_step_limit")]
    before = [module.time_step_limit for module in limited]
    assert before and before[0][0] > 0
    with pytest.raises(KeyError), time_steps_of_one_token(view.model):
        assert {module.time_step_limit for module in limited} == {(0.0, float("inf"))}
        raise KeyError
    assert [module.time_step_limit for module in limited] == before


def test_limits_of_time_steps_are_those_of_each_thread() -> None:
    """While drafts are verified, another thread may read a prompt, of another text or by the
    model's own generate()."""
    view = target("nemotron_h")
    limited: list[Any] = [m for m in view.model.modules() if hasattr(m, "time_step_limit")]
    layer, limit = limited[0], limited[0].time_step_limit
    with ThreadPoolExecutor(1) as other, time_steps_of_one_token(view.model):
        assert layer.time_step_limit == (0.0, float("inf"))
        assert other.submit(lambda: layer.time_step_limit).result() == limit
        assert copy.deepcopy(layer).__dict__["time_step_limit"] == limit


@pytest.mark.parametrize("kind", with_slow(KINDS[1::2], KINDS[::2]))
def test_rows_of_a_training_batch_do_not_see_their_padding(kind: str) -> None:
    view, lengths = target(kind), (24, 9)
    ids_BT = IDS.repeat(2, 1)
    mask_BT = torch.arange(24) < torch.tensor(lengths)[:, None]
    together_BTD = view.hidden(ids_BT * mask_BT, mask_BT.long())
    for row, length in enumerate(lengths):
        alone_1TD = view.hidden(ids_BT[row : row + 1, :length])
        torch.testing.assert_close(together_BTD[row, :length], alone_1TD[0], atol=1e-4, rtol=1e-4)
