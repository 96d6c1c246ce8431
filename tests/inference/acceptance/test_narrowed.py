"""Among the likeliest tokens alone, the device draws what it draws among all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa_heads.inference.acceptance import SampleThenMatch, at_once, narrowed
from medusa_heads.inference.acceptance.at_once import ProcessorsOnDevice, deepest_path, draw_all
from medusa_heads.inference.acceptance.narrowed import LEFT_OUT, Narrowed
from medusa_heads.inference.engine.noise import NO_TOKEN, Noise, NoiseOnDevice
from medusa_heads.trees.tree import TokenTree, TreeShape, chain_shape
from scripts.measure.host_waits import graphs_of, per_step
from tests.conftest import DEVICE, TinyLlama
from tests.inference.on_device import SAMPLING, drawn_planted, text, with_heads
from tests.inference.padded import padded
from tests.inference.planted import BUSHY
from tests.inference.walking import row

VOCAB, ROWS = 3000, 4
SHAPE = TreeShape.from_choices(BUSHY)
SETTINGS: dict[str, list[Any]] = {
    "top_k": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(40)],
    "top_p": [TopPLogitsWarper(0.9)],
    "small top_p": [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.05)],
    "min_p": [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.02)],
    "all": [
        TemperatureLogitsWarper(0.6),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.95),
        MinPLogitsWarper(0.01),
    ],
}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrowed, "_MANY", 64)


def noise_of(rows: int, vocab: int, seed: int) -> NoiseOnDevice:
    texts = [row(index=b, batch=rows) for b in range(rows)]
    keys_B = torch.tensor(Noise(seed, texts, [0] * rows).keys(texts))
    return NoiseOnDevice(keys_B, torch.arange(rows), torch.arange(vocab))


def tree_of(rows: int, shape: TreeShape = SHAPE) -> TokenTree:
    return shape.tree(torch.arange(shape.num_nodes).repeat(rows, 1))


def drawn(
    tree: TokenTree, logits_BNV: Tensor, given: list[Any], seed: int = 7
) -> tuple[Tensor, Tensor]:
    """Among the likeliest, and among all."""
    like = LogitsProcessorList(given)
    on_device = ProcessorsOnDevice(like, logits_BNV.device)
    on_device.take(like)
    noise = noise_of(ROWS, VOCAB, seed)
    assert Narrowed.of(on_device.copies, *logits_BNV.shape) is not None
    few_BN = draw_all(tree, logits_BNV, on_device.copies, noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_once.Narrowed, "of", lambda *_: None)
        return few_BN, draw_all(tree, logits_BNV, on_device.copies, noise)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens(setting: str) -> None:
    generator = torch.Generator().manual_seed(5)
    tree, left, seen = tree_of(ROWS), 0, 0
    for trial in range(10):
        sharp = 1.0 + trial * 3 / 4  # from flat to sure of itself
        logits_BNV = sharp * torch.randn(ROWS, SHAPE.num_nodes, VOCAB, generator=generator)
        if trial % 2:  # which has many equal scores
            logits_BNV = logits_BNV.bfloat16()
        few_BN, all_BN = drawn(tree, logits_BNV, SETTINGS[setting], seed=trial)
        known_BN = few_BN != LEFT_OUT
        assert torch.equal(few_BN[known_BN], all_BN[known_BN])
        assert known_BN[:, 0].all()
        left, seen = left + int((~known_BN).sum()), seen + known_BN.numel()
    assert left < 0.4 * seen
    assert (left > 0) == (setting in ("top_p", "min_p"))


@pytest.mark.parametrize("what", ["flat", "ties at the limit", "nan", "no token", "infinite"])
def test_what_is_not_sure_is_looked_at_as_a_whole(what: str) -> None:
    """As far as there is room: at the roots always."""
    logits_BNV = torch.full((ROWS, SHAPE.num_nodes, VOCAB), -50.0)
    if what == "flat":
        logits_BNV.zero_()
    elif what == "ties at the limit":
        logits_BNV[..., 100:104] = 3.0  # of which top_p leaves three, whichever these are
    elif what == "nan":
        logits_BNV[..., 7] = torch.nan
    elif what == "no token":
        logits_BNV.fill_(-torch.inf)
    else:
        logits_BNV[..., 7] = torch.inf
    few_BN, all_BN = drawn(tree_of(ROWS), logits_BNV, [TopPLogitsWarper(0.7)])
    assert torch.equal(few_BN[:, 0], all_BN[:, 0])
    assert (few_BN[:, 0] == NO_TOKEN).all() == (what in ("nan", "no token", "infinite"))
    known_BN = few_BN != LEFT_OUT
    assert torch.equal(few_BN[known_BN], all_BN[known_BN])
    if what != "ties at the limit":
        assert int(known_BN.sum()) == ROWS + max(2, known_BN.numel() // 16)


def test_more_equal_scores_than_are_looked_at() -> None:
    """Of those that top_k leaves, top_p could not tell how likely all together are."""
    logits_BNV = torch.full((ROWS, SHAPE.num_nodes, VOCAB), -50.0)
    logits_BNV[..., :10] = 0.0
    logits_BNV[..., 100:190] = -1.0
    limits = [TopKLogitsWarper(20), TopPLogitsWarper(0.31)]
    few_BN, all_BN = drawn(tree_of(ROWS), logits_BNV, limits)
    known_BN = few_BN != LEFT_OUT
    assert torch.equal(few_BN[known_BN], all_BN[known_BN])
    assert int(known_BN.sum()) == ROWS + max(2, known_BN.numel() // 16)


def test_with_noise_two_scores_are_equal() -> None:
    """Then the first of all tokens is drawn, which may be the second of the likeliest."""
    tree, every_V, tied = tree_of(ROWS), torch.arange(VOCAB), 0
    every_BNV = every_V.expand(ROWS, SHAPE.num_nodes, -1)
    for seed in range(20):
        noise_BNV = noise_of(ROWS, VOCAB, seed).behind(tree.depth_BN, every_BNV)
        logits_BNV = -20.0 - 0.01 * every_BNV
        logits_BNV[..., 5] = less_BN = noise_BNV[..., 9] - noise_BNV[..., 5]
        logits_BNV[..., 9] = 0.0
        tied_BN = (less_BN < 0) & (noise_BNV[..., 5] + less_BN == noise_BNV[..., 9])
        few_BN, all_BN = drawn(tree, logits_BNV, SETTINGS["top_k"][1:], seed)
        known_BN = few_BN != LEFT_OUT
        assert torch.equal(few_BN[known_BN], all_BN[known_BN])
        tied += int(tied_BN.sum())
    assert tied > 100


def test_no_path_goes_through_what_was_left_out() -> None:
    """It ends with the token of that node, which the one before it has drawn."""
    shape = chain_shape(5)
    tree = shape.tree(torch.tensor([[9, 1, 2, 3, 4]]))
    drawn_BN = torch.tensor([[1, 2, LEFT_OUT, 4, 5]])
    found = deepest_path(tree, drawn_BN, shape.max_depth)
    assert int(found.length_B1[0]) == 2
    assert found.tokens_BA[0, :2].tolist() == [1, 2]


@pytest.mark.parametrize(
    "given",
    [
        [TemperatureLogitsWarper(0.7)],
        [TopPLogitsWarper(0.9), TopKLogitsWarper(5)],
        [TopPLogitsWarper(0.9, filter_value=-1e4)],
        [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
        [TopKLogitsWarper(300)],
    ],
)
def test_other_processors_look_at_all_tokens(given: list[Any]) -> None:
    assert Narrowed.of(LogitsProcessorList(given), ROWS, SHAPE.num_nodes, 1 << 17) is None


@pytest.mark.parametrize(
    ("rows", "nodes", "vocab"), [(8, 1, 1 << 17), (1, 5, 1 << 17), (8, 16, 900)]
)
def test_where_it_would_be_more_work(rows: int, nodes: int, vocab: int) -> None:
    top_p = LogitsProcessorList([TopPLogitsWarper(0.9)])
    assert Narrowed.of(top_p, rows, nodes, vocab) is None
    assert Narrowed.of(top_p, 8, 16, 1 << 17) is not None


@pytest.mark.usefixtures("small_caches")
def test_planted_drafts_of_drawn_text(
    tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all nodes are sure, and where none is and there is room for the roots alone."""
    monkeypatch.setattr(narrowed, "_TIMES", 1)
    model: Any = tiny_llama().to(DEVICE)
    model.generation_config.pad_token_id = 0
    medusa, inputs = with_heads(model), padded([0, 3, 7], 12)
    expected = drawn_planted(medusa, inputs, [2, 0, 4, 1, 3])
    assert torch.equal(text(medusa, inputs, **SAMPLING), expected)
    assert max(medusa.last_stats.accepted) == 4 and medusa.last_stats.seconds["step"]
    monkeypatch.setattr(narrowed, "CLOSE", 2.0)
    monkeypatch.setattr(narrowed, "_FEWEST", 0)
    monkeypatch.setattr(narrowed, "_SHARE", 1 << 10)
    assert torch.equal(text(medusa, inputs, **SAMPLING), expected)
    assert max(medusa.last_stats.accepted) == 0
    monkeypatch.setattr(at_once, "LEFT_OUT", None)  # paths go through what was not looked at
    assert not torch.equal(text(medusa, inputs, **SAMPLING), expected)


@pytest.mark.parametrize("min_p", [0.01, 1], ids=str)  # of which the second is the host's
@pytest.mark.usefixtures("small_caches")
def test_the_host_is_asked_nothing_more(
    min_p: float, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    medusa, asked = with_heads(tiny_llama(num_layers=1).to(DEVICE)), []
    for times in (1, 1 << 20):  # narrowed, and not
        monkeypatch.setattr(narrowed, "_TIMES", times)
        with medusa.target.uncompiled():  # type: ignore[attr-defined]
            asked.append(per_step(medusa, 2, 9, **SAMPLING, min_p=min_p))
    assert asked[0] == asked[1]


@pytest.mark.slow
def test_it_is_a_part_of_the_graph(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrowed, "_TIMES", 1)
    medusa = with_heads(tiny_llama(num_layers=1).to(DEVICE))
    assert graphs_of(medusa, 2, 20, **SAMPLING, min_p=0.01) == (True, 1, 0)


def test_what_leaves_all_tokens_is_no_limit() -> None:
    """Of min_p=0 too transformers makes a processor, behind which no node would be sure."""
    warm, nothing, little = TemperatureLogitsWarper(0.7), MinPLogitsWarper(0), MinPLogitsWarper(0.1)
    rule = SampleThenMatch(LogitsProcessorList([warm, nothing, little]), do_sample=True)
    assert [*rule.processors] == [warm, little]
    assert Narrowed.of(rule.processors, ROWS, SHAPE.num_nodes, 1 << 17) is not None
