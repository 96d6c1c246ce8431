"""Targets whose scans begin anew in transformers, and go on from their state here."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.engine.capability import capability
from scripts.prove.tiny_models import builder
from tests.inference.recurrent import planted, prompt, tiny_target, written
from tests.pairs import with_slow

KINDS = ("jamba", "mamba", "zamba")  # states alone; with attention; a state for each head

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


@pytest.mark.parametrize("kind", with_slow(["jamba", "mamba"], ["mamba2", "falcon_mamba", "zamba"]))
def test_planted_chains_are_token_equal(kind: str) -> None:
    target, inputs = tiny_target(kind), prompt()
    assert capability(target) == "recurrent"
    given: tuple[dict[str, Any], ...] = ({"max_new_tokens": 32},)
    if kind == "mamba":  # the others draw from the same kinds of state
        given += ({"max_new_tokens": 32, "do_sample": True, "temperature": 1.3},)
    for drawn in given:
        expected = written(target.model, inputs, **drawn)
        got, stats = planted(target, inputs, expected, **drawn)
        assert torch.equal(got, expected) and stats.tokens_per_step > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_that_begins_anew_is_noticed_by_the_gate(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "medusa_heads.target.target.scans_go_on", lambda model, layers: nullcontext()
    )
    with pytest.raises(UnsupportedArchitecture, match=f"{kind} keeps a recurrent state, on which"):
        capability(TargetModel(builder(kind)((0.15, 0.15))))


def test_scans_elsewhere_are_left_alone() -> None:
    """What transformers' own forwards make of a text is the same before and after."""
    model = copy.deepcopy(tiny_target("jamba").model)
    ids_1T = prompt()["input_ids"]
    with torch.no_grad():
        before = model(ids_1T).logits
        capability(TargetModel(model))
        assert torch.equal(model(ids_1T).logits, before)


@pytest.mark.parametrize("kind", ["jamba", "mamba2"])
def test_compiled_they_are_refused_by_name(kind: str) -> None:
    target = tiny_target(kind)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    with pytest.raises(UnsupportedArchitecture, match=f"{kind} is a Mamba, whose state is not"):
        model = MedusaModel(target, heads, tree="chain", compile=True, compile_backend="eager")
        written(model, prompt())


def test_states_alone_do_not_say_what_they_have_read() -> None:
    target = tiny_target("mamba")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    model = MedusaModel(target, heads, tree="chain")
    first = written(model, prompt(), return_dict_in_generate=True)
    assert torch.equal(first.sequences, written(target.model, prompt()))
    rest = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    with pytest.raises(ValueError, match="caches alone, if they have attention layers besides"):
        written(model, rest, cache_params=first.past_key_values)


@pytest.mark.parametrize("kind", with_slow(["jamba"], ["zamba"]))
def test_a_text_goes_on_from_a_cache_that_was_returned(kind: str) -> None:
    target, inputs = tiny_target(kind), prompt()
    expected = written(target.model, inputs)
    first, _ = planted(target, inputs, expected, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, prompt(length=9, seed=5)["input_ids"]], dim=1)
    rest = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    whole = written(target.model, rest)
    got, _ = planted(target, rest, whole, past_key_values=first.past_key_values)
    assert torch.equal(got, whole)
