"""Targets whose attention reads what an indexer chooses, with the truth planted on trees."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TargetModel
from medusa_heads.errors import UnsupportedArchitecture
from medusa_heads.inference.bench.speedup import cache_bytes_per_token
from medusa_heads.inference.engine.capability import capability
from medusa_heads.inference.engine.probe import (
    Probe,
    Prober,
    Trial,
    few_rows_chosen,
    indexers,
    text_logits,
)
from medusa_heads.target.cache import IndexedRowLayer, RowLayer
from medusa_heads.target.recurrent import CompressedRowLayer
from medusa_heads.target.stacks import Stacks
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import builder, random_weights
from tests.inference.padded import padded
from tests.inference.planted import BUSHY
from tests.inference.recurrent import CHAIN, planted, prompt, tiny_target, written
from tests.pairs import with_slow

TREES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
VERIFIES = {
    **dict.fromkeys((kind for kind in TREES if kind in CONFIG_MAPPING), "tree"),
    "minimax_m3_vl_text": "chain",  # its blocks of keys go by slot
    "deepseek_v4": "recurrent",  # entries of several tokens
    "qwen4_exp_text": "recurrent",  # an index and linear attention
}
ALIKE = ("axk2", "dots3_note_text", "glm_moe_dsa", "hy_v4", "qwen4_exp_text")
DRAWN = ("deepseek_v32",)  # what is drawn asks the cache nothing else

pytestmark = pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")


@pytest.mark.parametrize(
    "kind",
    [
        # Trees of the others are those of deepseek_v32, and of a batch of glm_moe_dsa below;
        # an index beside a state is noticed below.
        pytest.param(kind, marks=pytest.mark.slow if kind in ALIKE else ())
        for kind in VERIFIES
    ],
)
def test_planted_drafts_are_token_equal(kind: str) -> None:
    target, inputs = tiny_target(kind), prompt()
    assert capability(target) == VERIFIES[kind]
    choices = BUSHY if VERIFIES[kind] == "tree" else CHAIN
    drawn = {"do_sample": True, "temperature": 1.3}
    for how in (dict[str, Any](), drawn) if kind in DRAWN else ({},):
        options = {"max_new_tokens": 20, **how}
        expected = written(target.model, inputs, **options)
        got, stats = planted(target, inputs, expected, choices=choices, **options)
        assert torch.equal(got, expected)
        assert stats.tokens_per_step > 1.5


@pytest.mark.parametrize("kind", with_slow(["glm_moe_dsa"], ["deepseek_v32"]))
def test_rows_of_a_padded_batch_keep_their_own(kind: str) -> None:
    target, inputs = tiny_target(kind), padded([0, 7, 13], 21)
    expected = written(target.model, inputs)
    got, stats = planted(target, inputs, expected, choices=BUSHY)
    assert torch.equal(got, expected) and stats.tokens_per_step > 1.5


def not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexedRowLayer, "set_length", RowLayer.set_length)


def not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index keys of an accepted path stay where the tree wrote them."""
    own = Stacks.move_rows

    def move_rows(stacks: Stacks, source_BA: Tensor, destination_BA: Tensor) -> None:
        index = [stack for stack in stacks.stacks if stack.shape[-1] == 16]  # numbers of a key
        before = [stack.clone() for stack in index]
        own(stacks, source_BA, destination_BA)
        for stack, was in zip(index, before, strict=True):
            stack.copy_(was)

    monkeypatch.setattr(Stacks, "move_rows", move_rows)


def not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompressedRowLayer, "put_back", lambda layer: None)


FAULTS = [
    (not_dropped, "deepseek_v32"),
    (not_dropped, "minimax_m3_vl_text"),
    (not_dropped, "qwen4_exp_text"),
    (not_moved, "deepseek_v32"),
    (not_put_back, "deepseek_v4"),
]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_what_is_kept_wrongly_is_noticed_in_the_text(
    fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls of the tests above."""
    target, inputs = tiny_target(kind), prompt()
    expected = written(target.model, inputs, max_new_tokens=20)
    choices = BUSHY if capability(target) == "tree" else CHAIN
    fault(monkeypatch)
    try:
        got, _ = planted(target, inputs, expected, choices=choices, max_new_tokens=20)
    except (IndexError, RuntimeError, ValueError):  # rows and index keys of unequal numbers
        assert fault is not_dropped
    else:
        assert not torch.equal(got, expected)


@pytest.mark.parametrize(
    ("fault", "kind"), [(not_dropped, "deepseek_v32"), (not_put_back, "deepseek_v4")]
)
def test_what_is_kept_wrongly_is_noticed_by_the_gate(
    fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(UnsupportedArchitecture):
        capability(TargetModel(builder(kind)((0.15, 0.15))))


def with_settings(kind: str, **settings: int) -> TargetModel:
    config = tiny_config(kind)
    config.update(settings)
    return TargetModel(random_weights(AutoModelForCausalLM.from_config(config), (0.15, 0.15)))


def large_blocks() -> TargetModel:
    """Its indexer chooses sixteen blocks of 128 keys, as the released model's does."""
    return with_settings("minimax_m3_vl_text", index_block_size=128, index_topk_blocks=16)


def test_a_choice_that_short_texts_do_not_show_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a short text are chosen, however an indexer counts blocks."""
    assert capability(large_blocks()) == "chain"
    monkeypatch.setattr(
        "medusa_heads.inference.engine.capability.few_rows_chosen", lambda target: nullcontext()
    )
    assert capability(large_blocks()) == "tree"  # which a long text would show to be wrong


@pytest.mark.parametrize("narrows", [True, False])
def test_a_choice_beside_a_state_is_narrowed_as_well(
    narrows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = IndexedRowLayer.update_indexer

    def mixed_up(layer: IndexedRowLayer, new_BTX: Tensor) -> Tensor:
        all_BLX = right(layer, new_BTX)
        return all_BLX.flip(1) if 1 < new_BTX.shape[1] < all_BLX.shape[1] else all_BLX

    target = with_settings("qwen4_exp_text", indexer_budget=2048, indexer_compress_ratio=16)
    monkeypatch.setattr(IndexedRowLayer, "update_indexer", mixed_up)
    if not narrows:
        monkeypatch.setattr("medusa_heads.inference.engine.probe._FEW", {})
        assert capability(target) == "recurrent"  # which a long text would show to be wrong
        return
    with pytest.raises(UnsupportedArchitecture, match="several tokens at once do not do what"):
        capability(target)


def test_indexers_choose_as_before_behind_the_block() -> None:
    target = large_blocks()
    found: list[Any] = indexers(target)
    settings = [(m.block_size, m.topk_blocks) for m in found]
    assert settings == [(128, 16)] * 2
    with pytest.raises(KeyError), few_rows_chosen(target):
        assert {(m.block_size, m.topk_blocks) for m in found} == {(4, 2)}
        raise KeyError
    assert [(m.block_size, m.topk_blocks) for m in indexers(target)] == settings


def test_texts_of_other_threads_choose_as_before_within_the_block() -> None:
    """Which may be decoded while another decoder is attached."""
    scaled = builder("llama4_text")((0.15, 0.15))
    for target in (large_blocks(), TargetModel(scaled)):
        ids_1T = prompt()["input_ids"]
        with torch.no_grad(), ThreadPoolExecutor(1) as other:
            before = text_logits(target, ids_1T)
            with few_rows_chosen(target):
                assert not torch.equal(text_logits(target, ids_1T), before)
                theirs = other.submit(torch.no_grad()(text_logits), target, ids_1T).result()
            assert torch.equal(theirs, before)


def test_two_threads_leave_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target = with_settings("deepseek_v32", index_topk=64)
    second_tries, first_is_done = Event(), Event()

    class Waiting(Prober):
        """Of two that try at once the first one ends first, if they are let."""

        def probe(self, trial: Trial) -> Probe:
            if current_thread() is first:
                second_tries.wait(0.5)
            else:
                second_tries.set()
                first_is_done.wait(0.5)
            return super().probe(trial)

    def first_one() -> None:
        capability(target)
        first_is_done.set()

    monkeypatch.setattr("medusa_heads.inference.engine.capability.Prober", Waiting)
    first, second = Thread(target=first_one), Thread(target=capability, args=(target,))
    first.start()
    second.start()
    first.join()
    second.join()
    assert {module.index_topk for module in indexers(target)} == {64}


def test_an_indexer_that_cannot_be_narrowed_is_trusted_with_no_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("medusa_heads.inference.engine.probe._FEW", {})
    target = TargetModel(builder("deepseek_v32")((0.15, 0.15)))
    with pytest.warns(UserWarning, match="nothing says how many rows its indexer chooses"):
        assert capability(target) == "chain"


def test_a_text_goes_on_from_caches_with_an_index() -> None:
    target, inputs = tiny_target("deepseek_v32"), prompt()
    torch.manual_seed(3)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=3))
    model = MedusaModel(target, heads, tree=8)
    whole = written(target.model, inputs)
    options = {"max_new_tokens": 20, "return_dict_in_generate": True}
    for writes in (model, target.model):  # our cache, and transformers' own
        first = written(writes, inputs, **options)
        rest = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
        cache = first.past_key_values
        assert torch.equal(written(model, rest, max_new_tokens=12, past_key_values=cache), whole)
        assert cache.get_seq_length() == whole.shape[1] - 1
        rest = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        longer = written(target.model, rest, max_new_tokens=9)
        assert torch.equal(
            written(target.model, rest, max_new_tokens=9, past_key_values=cache), longer
        )


def test_an_index_is_not_compiled() -> None:
    target = tiny_target("deepseek_v32")
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    with pytest.raises(UnsupportedArchitecture, match="indexed_attention layers, whose mask is"):
        MedusaModel(target, heads, compile=True)


def test_what_a_token_takes_has_its_index_key() -> None:
    target = tiny_target("deepseek_v32")
    latent = 32 + 8  # numbers of keys and values, and 16 of the index key, in four layers
    assert cache_bytes_per_token(target) == 4 * (latent + 16) * 4
    # DeepSeek V4 reads one tensor as keys and as values, which is kept once.
    assert cache_bytes_per_token(tiny_target("deepseek_v4")) == 4 * 16 * 4
