"""Acceptance: the walk on hand-set logits, and the distribution of sampled tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from medusa_heads.inference.acceptance import SampleThenMatch, make_rule
from medusa_heads.inference.acceptance.rejection import RejectionSampling
from medusa_heads.inference.engine.rows import Row, ScoreRecorder, StopCheck
from medusa_heads.trees.tree import TreeShape
from tests.inference.walking import VOCAB, logits_naming, row, tree


@pytest.fixture(params=[True, False], ids=["all at once", "lazy"])
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk for devices that run ahead of the host, and the one for a CPU."""
    if request.param:
        monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: True)
        monkeypatch.delattr(SampleThenMatch, "_draw")  # nothing is drawn node by node
    else:
        monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: False)


@pytest.mark.usefixtures("runs_ahead")
@pytest.mark.parametrize(
    ("named", "path", "tokens"),
    [
        pytest.param([0, 0, 0, 0, 0, 0], [0], [0], id="never accepts"),
        pytest.param([6, 7, 8, 3, 0, 0], [0, 1, 2, 3], [6, 7, 8, 3], id="always accepts"),
        pytest.param([9, 0, 0, 0, 7, 11], [0, 4, 5], [9, 7, 11], id="the second branch"),
        pytest.param([6, 0, 0, 0, 0, 0], [0, 1], [6, 0], id="token 0 is no padding"),
        pytest.param([7, 0, 0, 0, 0, 0], [0], [7], id="a token that stands behind others alone"),
        pytest.param([6, 9, 0, 0, 0, 0], [0, 1], [6, 9], id="a token of another branch"),
    ],
)
def test_greedy_walk(named: list[int], path: list[int], tokens: list[int]) -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row()
    assert rule(tree(), logits_naming(named), [one]) == [path]
    assert one.tokens == tokens


@pytest.mark.usefixtures("runs_ahead")
def test_rows_that_run_ahead_walk_their_own_paths() -> None:
    walk_a_batch(SampleThenMatch(LogitsProcessorList(), do_sample=False))


@pytest.mark.parametrize("processors", [[], [TopKLogitsWarper(12)]], ids=["plain", "warped"])
def test_rows_of_a_batch_walk_their_own_paths(processors: list[TopKLogitsWarper]) -> None:
    walk_a_batch(SampleThenMatch(LogitsProcessorList(processors), do_sample=False))


def walk_a_batch(rule: SampleThenMatch) -> None:
    """Rows that end, accept all, nothing, another branch; and one that has ended before."""
    all_right, wrong, branch = [6, 7, 8, 3, 0, 0], [0] * 6, [9, 0, 0, 0, 7, 11]
    rows = [row(max_length=5), row(), row(max_length=4), row(), row()]
    rows[2].commit(1)
    named = [all_right, all_right, all_right, wrong, branch]
    logits_BNV = torch.cat([logits_naming(tokens) for tokens in named])
    assert rule(tree(5), logits_BNV, rows) == [[0, 1], [0, 1, 2, 3], [], [0], [0, 4, 5]]
    assert [one.tokens for one in rows] == [[6, 7], [6, 7, 8, 3], [1], [0], [9, 7, 11]]


@pytest.mark.usefixtures("runs_ahead")
def test_greedy_tokens_are_compared_in_fp32_as_generate_compares_them() -> None:
    logits_1NV = logits_naming([6, 0, 0, 0, 0, 0]).double()
    logits_1NV[0, 0, 9] = logits_1NV[0, 0, 6] + 1e-9
    one = row()
    SampleThenMatch(LogitsProcessorList(), do_sample=False)(tree(), logits_1NV, [one])
    assert one.tokens[0] == 6


def test_nothing_follows_an_end_token_inside_an_accepted_block() -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row(eos=7)
    assert rule(tree(), logits_naming([6, 7, 8, 3, 0, 0]), [one]) == [[0, 1]]
    assert one.tokens == [6, 7] and one.done


def test_length_limit_inside_an_accepted_block() -> None:
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    one = row(max_length=6)
    assert rule(tree(), logits_naming([6, 7, 8, 3, 0, 0]), [one]) == [[0, 1, 2]]
    assert one.tokens == [6, 7, 8] and one.length == 6 and one.done


class WritesInPlace(LogitsProcessor):
    """Notes what it is given, and takes token 6 away in the memory of the scores."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts += input_ids.tolist()
        self.dtypes.add(scores.dtype)
        scores[:, 6] = -1000.0
        return scores


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_only_the_targets_plain_choice_is_made_ahead(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors are asked, and dice thrown, on devices that run ahead as well."""
    monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: runs_ahead)
    bans_six = LogitsProcessorList([SuppressTokensLogitsProcessor([6])])
    logits_1NV = logits_naming([6, 0, 0, 0, 7, 11])
    logits_1NV[0, 0, 9] = 19.5  # drawn in three of eight cases
    one = row()
    assert SampleThenMatch(bans_six, do_sample=False)(tree(), logits_1NV, [one]) == [[0, 4, 5]]
    assert one.tokens == [9, 7, 11]
    torch.manual_seed(0)
    draws = SampleThenMatch(LogitsProcessorList(), do_sample=True)
    paths = [draws(tree(), logits_1NV, [row()])[0] for _ in range(30)]
    assert {path[1] for path in paths} == {1, 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_processors_get_the_text_and_a_copy_of_the_logits_in_fp32(
    runs_ahead: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: runs_ahead)
    notes = WritesInPlace()
    rule = SampleThenMatch(LogitsProcessorList([notes]), do_sample=False)
    logits_1NV = logits_naming([6, 0, 0, 0, 7, 11]).to(dtype)
    logits_1NV[0, 0, 9] = 10.0  # next best
    given = logits_1NV.clone()
    one = row()
    one.recorder = ScoreRecorder()
    assert rule(tree(), logits_1NV, [one]) == [[0, 4, 5]] and one.tokens == [9, 7, 11]
    assert notes.texts == [[1, 2, 5], [1, 2, 5, 9], [1, 2, 5, 9, 7]]
    assert notes.dtypes == {torch.float32} and torch.equal(logits_1NV, given)
    walked_NV = given[0, [0, 4, 5]].float()
    assert torch.equal(torch.cat(one.recorder.logits), walked_NV)
    walked_NV[:, 6] = -1000.0
    assert torch.equal(torch.cat(one.recorder.scores), walked_NV)


@pytest.mark.parametrize("batch", [1, 3])
def test_warpers_get_the_scores_in_fp32_where_the_text_lies(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix of a target that is spread over devices may lie elsewhere than the prompt."""

    def note(_: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise LookupError(input_ids.device.type, scores.device.type, scores.dtype, len(scores))

    monkeypatch.setattr(TopKLogitsWarper, "__call__", note)
    rule = SampleThenMatch(LogitsProcessorList([TopKLogitsWarper(8)]), do_sample=True)
    stop = StopCheck(StoppingCriteriaList())
    rows = [Row(0, 1, torch.tensor([1, 2, 5], device="meta"), stop) for _ in range(batch)]
    with pytest.raises(LookupError) as found:
        rule(tree(batch), torch.zeros(batch, 6, VOCAB, dtype=torch.float64), rows)
    assert found.value.args == ("meta", "meta", torch.float32, batch)


def test_a_child_in_the_last_place_is_walked_to_by_its_own_number() -> None:
    shape = TreeShape([(0,), (0, 0), (1,)])
    rule = SampleThenMatch(LogitsProcessorList(), do_sample=False)
    last = shape.tree(torch.tensor([[5, 6, 7, 9]]))
    assert rule(last, logits_naming([9, 0, 0, 4]), [row()]) == [[0, 3]]


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("warpers", [[], [TopKLogitsWarper(8)]], ids=["plain", "warped"])
def test_scores_are_recorded_for_every_token(
    warpers: list[TopKLogitsWarper], runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: runs_ahead)
    rule = SampleThenMatch(LogitsProcessorList(warpers), do_sample=False)
    one = row()
    one.recorder = ScoreRecorder()
    rule(tree(), logits_naming([6, 7, 8, 3, 0, 0]), [one])
    assert torch.equal(torch.cat(one.recorder.logits), logits_naming([6, 7, 8, 3])[0])


@pytest.mark.parametrize("name", ["lossless", "rejection", "typical"])
def test_who_watches_is_told_the_logits_that_chose_each_token(name: str) -> None:
    """As the target gave them, whatever processors make of them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    rule: Any = RejectionSampling(warpers, do_sample=True)
    if name != "rejection":
        rule = make_rule(name, warpers, do_sample=True)
    shown = tree()
    if name == "rejection":
        drawn_from = torch.zeros(1, VOCAB).index_fill(1, shown.tokens_BN[0, [1, 4]], 0.5)
        shown = replace(shown, drawn_from={0: drawn_from})
    one, logits_1NV = row(), logits_naming([9, 0, 0, 0, 7, 11])
    told: list[tuple[Tensor, int]] = []
    one.watch = lambda logits_V, token: told.append((logits_V, token))
    (path,) = rule(shown, logits_1NV, [one])
    assert path == [0, 4, 5] and [token for _, token in told] == one.tokens == [9, 7, 11]
    assert torch.equal(torch.stack([logits_V for logits_V, _ in told]), logits_1NV[0, path])


class OfItsRow(LogitsProcessor):
    """Names a token of its own for each row of the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        named_B = torch.tensor([9, 6, 11])[: len(scores)]
        return scores + 100 * torch.nn.functional.one_hot(named_B, VOCAB)


def test_processors_see_each_row_at_its_place_in_the_batch() -> None:
    rule = SampleThenMatch(LogitsProcessorList([OfItsRow()]), do_sample=False)
    rows = [row(index=index, batch=3) for index in (2, 0, 1)]
    paths = rule(tree(3), logits_naming([0] * 6).expand(3, -1, -1), rows)
    assert paths == [[0], [0, 4], [0, 1]]
    assert [one.tokens for one in rows] == [[11], [9, 9], [6, 6]]


class NamesInTurn(LogitsProcessor):
    """Names another token at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        named = torch.tensor([9, 7, 11][self.calls])
        self.calls += 1
        return scores + 100 * torch.nn.functional.one_hot(named, VOCAB)


@pytest.mark.parametrize("batch", [1, 2])
def test_processors_keep_a_state_for_each_row(batch: int) -> None:
    rule = SampleThenMatch(LogitsProcessorList([NamesInTurn()]), do_sample=False)
    rows = [row(index=index, batch=batch) for index in range(batch)]
    paths = rule(tree(batch), logits_naming([0] * 6).expand(batch, -1, -1), rows)
    assert paths == [[0, 4, 5]] * batch
    assert [one.tokens for one in rows] == [[9, 7, 11]] * batch


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_drawn_with_the_random_numbers_of_generate(
    batch: int, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One draw for all rows that still walk, a level after the other."""
    monkeypatch.setattr(f"{SampleThenMatch.__module__}._runs_ahead", lambda device: runs_ahead)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    ids: Any = torch.zeros(1, 1, dtype=torch.long)
    deep = 0
    for seed in range(40):
        torch.manual_seed(seed)
        logits_BNV = torch.randn(batch, 6, VOCAB, dtype=torch.float64)
        logits_BNV[:, :, [6, 7, 9]] += 2
        rows = [row(index=index, batch=batch) for index in range(batch)]
        paths = SampleThenMatch(warpers, do_sample=True)(tree(batch), logits_BNV, rows)
        torch.manual_seed(seed)
        torch.randn(batch, 6, VOCAB, dtype=torch.float64)
        for level in range(max(map(len, paths))):
            walking = [b for b, path in enumerate(paths) if len(path) > level]
            scores: Any = logits_BNV[walking, [paths[b][level] for b in walking]].float()
            drawn = torch.multinomial(warpers(ids, scores).softmax(-1), num_samples=1)
            assert drawn[:, 0].tolist() == [rows[b].tokens[level] for b in walking]
            deep += level > 0
    assert deep > 10
