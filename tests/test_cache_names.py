"""The cache under the names that versions of transformers give it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.cache_names import CACHE_NAMES, cache_argument, cache_field, cache_of, take_cache
from tests.conftest import TinyLlama


def test_a_forward_is_asked_by_which_name_it_takes_one() -> None:
    def newest(input_ids: Any, cache: Any = None) -> None: ...
    def older(input_ids: Any, past_key_values: Any = None) -> None: ...
    def older_mamba(input_ids: Any, cache_params: Any = None) -> None: ...
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    assert tuple(map(cache_argument, (newest, older, older_mamba))) == CACHE_NAMES
    assert cache_argument(wrapped) == cache_field()


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_callers_is_taken_under_any_name(name: str) -> None:
    mine = DynamicCache()
    given = {"use_cache": True, "past_key_values": None} | {name: mine}
    assert take_cache(given) is mine
    assert given == {"use_cache": True}
    assert take_cache(given) is None


def test_transformers_warns_of_no_name(tiny_llama: TinyLlama) -> None:
    """Where a name is on its way out, forwards still take it, and say so."""
    target = TargetModel(tiny_llama())
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    medusa = MedusaModel(target, heads, tree="7")
    ids_1T = torch.arange(5, 17)[None]
    options: Any = {"do_sample": False, "return_dict_in_generate": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        first: Any = medusa.generate(ids_1T, max_new_tokens=9, **options)
        given = {target.cache_argument: cache_of(first)}
        second: Any = medusa.generate(first.sequences, max_new_tokens=9, **given, **options)
        assert cache_of(second) is cache_of(first)
        model: Any = target.model
        whole = model.generate(ids_1T, max_new_tokens=18, do_sample=False)
    assert torch.equal(second.sequences, whole)
