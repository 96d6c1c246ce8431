"""Steps on the device from a recurrent state: generate()'s tokens, whatever was refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import HeadsConfig, MedusaModel, TrainingFreeModel, new_heads
from medusa_heads.errors import MedusaWarning, UnsupportedArchitecture
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.merged import MergedTrees
from medusa_heads.inference.engine import reading
from medusa_heads.inference.engine.device_recurrent import RecurrentDeviceState
from medusa_heads.target.graphs.compiled import CompiledTarget
from medusa_heads.target.graphs.static_cache import StaticRecurrentCache
from medusa_heads.target.recurrent import RecurrentCache
from scripts.measure.host_waits import graphs_of, per_step, prompts
from tests.inference.on_device import HERE, LATE, SAMPLING, PlantedOnDevice, text
from tests.inference.padded import padded
from tests.inference.recurrent import (
    CHAIN,
    IN_GRAPHS,
    KINDS,
    prompt,
    repeating,
    short_target,
    tiny_target,
    written,
)
from tests.pairs import alternately

pytestmark = IN_GRAPHS
BATCHES = ([0], [0, 3, 5])  # padding of each row
BOTH = [2, 0, 4, 1, 3]
NEW = 31
# Their layers are of kinds that others have too.
ALIKE = tuple(kind for kind in KINDS if kind not in ("lfm2", "nemotron_h"))


def wrong(graph: Any, _inputs: Any) -> Any:
    """A backend whose concatenations are not what was asked for."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.cat):
        with graph.graph.inserting_after(node):
            more = graph.graph.call_function(torch.mul, (node, 1.1))
        node.replace_all_uses_with(more)
        more.args = node, 1.1  # which was replaced as well
    graph.recompile()
    return graph.forward


def medusa_of(
    target_kind: str, backend: Any = "eager", *, whole: bool = False, **config: Any
) -> MedusaModel:
    torch.manual_seed(3)
    target = (tiny_target if whole else short_target)(target_kind)
    heads = new_heads(target, HeadsConfig(num_heads=4, **config))
    return MedusaModel(target, heads, tree="4", compile="steps", compile_backend=backend)


def planted(medusa: MedusaModel, inputs: Any, truth: list[int], **options: Any) -> Tensor:
    whole = written(medusa.target.model, inputs, max_new_tokens=NEW + 9, **options)
    length = inputs["input_ids"].shape[1]
    medusa.drafter = PlantedOnDevice(whole[:, length:].tolist(), truth, CHAIN)
    return torch.as_tensor(whole[:, : length + NEW])


@pytest.mark.parametrize(("kind", "padding"), alternately(KINDS, BATCHES, slow=ALIKE))
def test_planted_chains(kind: str, padding: list[int]) -> None:
    medusa, inputs = medusa_of(kind, whole=True), padded(padding, 12)
    for truth in ([4], [0], BOTH):
        expected = planted(medusa, inputs, truth)
        usual = NEW // 2 if truth == [0] else NEW
        for new in (NEW - 1, 2, NEW) if truth == BOTH else (usual,):  # the last within a chain
            got = text(medusa, inputs, max_new_tokens=new)
            assert torch.equal(got, expected[:, : 12 + new])
            assert medusa.last_stats.seconds["step"]
        if truth == [4]:
            assert medusa.last_stats.tokens_per_step > (3 if LATE else 4)  # some chains are cut


@pytest.mark.parametrize("most", [0, 1, 3])
def test_little_room_to_read_again(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains then become shorter, to nothing: a row that reads all of it goes on behind it."""
    monkeypatch.setattr(Drafter, "most_again", lambda *_: most)
    for kind, padding in (("lfm2", [0]), ("qwen3_next", [0, 3, 5])):
        medusa, inputs = medusa_of(kind), padded(padding, 12)
        for truth in (BOTH, [1]):
            expected = planted(medusa, inputs, truth)
            assert torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected)
            assert medusa.last_stats.tokens_per_step > 1.2


def test_negative_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa, inputs = medusa_of("lfm2"), padded([0, 3, 5], 12)
    expected = planted(medusa, inputs, BOTH)
    keep = RecurrentDeviceState._keep

    def keep_all(state: RecurrentDeviceState, *given: Tensor) -> None:
        keep(state, *given)
        state.kept_B.fill_(True)

    for broken, name, wrong in (
        (StaticRecurrentCache, "settle", lambda *_: None),
        (RecurrentDeviceState, "_keep", keep_all),
        (RecurrentDeviceState, "_move_rows", lambda *_: None),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(broken, name, wrong)
            assert not torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected)
    assert torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected)


def test_rows_end_apart() -> None:
    medusa, inputs = medusa_of("falcon_h1"), padded([0, 3, 5], 12)
    whole = planted(medusa, inputs, BOTH)
    for place in (3, 18):
        ends: dict[str, Any] = {"eos_token_id": [int(whole[0, 12 + place]), int(whole[-1, 23])]}
        expected = written(medusa.target.model, inputs, max_new_tokens=NEW, **ends)
        assert torch.equal(text(medusa, inputs, max_new_tokens=NEW, **ends), expected)


KINDS_OF_HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "hydra": {"kind": "hydra"},
    "features": {"features": (0,), "correction_rank": 8},
    "prefix": {"prefix_attention": True},
    "induction": {"induction": True},
    "block": {"kind": "block"},
    "eagle3": {"kind": "eagle3"},
}


@pytest.mark.parametrize(
    ("kind", "options"), alternately(KINDS_OF_HEADS, ({}, SAMPLING), slow=("hydra", "prefix"))
)
def test_heads_write_what_steps_that_ask_the_host_write(kind: str, options: dict[str, Any]) -> None:
    medusa, inputs = medusa_of("lfm2", **KINDS_OF_HEADS[kind]), padded([0, 4], 12)
    asking = MedusaModel(medusa.target.model, medusa.heads, tree="none")
    got = text(medusa, inputs, max_new_tokens=NEW, **options)
    assert medusa.last_stats.seconds["step"]
    torch.manual_seed(3)
    told = {"do_sample": False, **inputs, "max_new_tokens": NEW, **options}
    assert torch.equal(got, torch.as_tensor(asking.generate(**told)))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("made", ["auto", "suffix"])
def test_chains_merged_of_the_text_and_heads(made: str, compiled: bool) -> None:
    target, inputs = short_target("lfm2"), repeating()
    options: Any = {"compile": "steps", "compile_backend": "eager"}
    if made == "suffix":
        model: Any = TrainingFreeModel(target, made, **options)
    else:
        heads = new_heads(target, HeadsConfig(num_heads=2))
        model = MedusaModel(target, heads, tree=made, **options)
    assert isinstance(model.drafter, MergedTrees)
    with nullcontext() if compiled else model.target.uncompiled():
        got = written(model, inputs, max_new_tokens=NEW)
    assert torch.equal(got, written(target.model, inputs, max_new_tokens=NEW))
    assert model.last_stats.seconds["step"]


@pytest.mark.parametrize("unread", [17, 19])
def test_a_text_goes_on_from_what_was_read(unread: int) -> None:
    """Also with tokens that its states have not read yet."""
    medusa, inputs = medusa_of("lfm2"), prompt(12)
    whole = planted(medusa, inputs, [0])
    with medusa.target.uncompiled():  # type: ignore[attr-defined]
        half = written(medusa, inputs, max_new_tokens=unread, return_dict_in_generate=True)
        assert type(half.past_key_values) is RecurrentCache
        rest = {"input_ids": half.sequences, "attention_mask": torch.ones_like(half.sequences)}
        options = {"max_new_tokens": NEW - unread, "past_key_values": half.past_key_values}
        medusa.drafter.texts_BT = whole[:, 12 + unread :]  # type: ignore[attr-defined]
        assert torch.equal(written(medusa, rest, **options), whole)
    assert medusa.last_stats.seconds["step"]


HOW = alternately((3, 1), (SAMPLING, {"do_sample": False}))


@pytest.mark.parametrize(("batch", "options"), HOW)
def test_the_host_waits_once_a_step(batch: int, options: dict[str, Any]) -> None:
    medusa = medusa_of("lfm2")
    with medusa.target.uncompiled():  # type: ignore[attr-defined]
        asked = per_step(medusa, batch, NEW, **options)
    assert asked == {"read": 1, "shape": 0, "built": 0, "copied": int(LATE)}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "options"), HOW)
def test_two_graphs_serve_all_steps(batch: int, options: dict[str, Any]) -> None:
    medusa = medusa_of("lfm2")
    assert graphs_of(medusa, batch, NEW, **options) == (True, 2 - LATE, 0)
    again = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    medusa.generate(**prompts(medusa, batch), **options, max_new_tokens=NEW + 20)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == again


@pytest.mark.slow
def test_what_a_compiler_gets_wrong_is_refused_by_name() -> None:
    medusa, inputs = medusa_of("lfm2", wrong), prompt(12)
    planted(medusa, inputs, BOTH)
    for _ in range(3):  # no later text trusts it
        with pytest.raises(UnsupportedArchitecture, match="the states of lfm2 differ by"):
            written(medusa, inputs, max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("part", "late"),
    [
        # A step late the host sees it last; and who settles the states alone settles half.
        pytest.param(part, late, marks=marks, id=f"{part}-{'late' if late else 'at once'}")
        for part in ("neither", "held", "state")
        for late in (set(), {HERE})
        for marks in [[] if part == "held" and late else [pytest.mark.slow]]
    ],
)
def test_states_that_a_graph_does_not_settle_are_noticed(
    part: str, late: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = StaticRecurrentCache.settle

    def in_part(cache: StaticRecurrentCache, kept_B: Tensor) -> None:
        if not torch.compiler.is_compiling():
            settle(cache, kept_B)
        elif part != "neither":
            settled = cache.settled(kept_B)
            into = cache.held if part == "held" else cache.states()
            for of_cache, each in zip(into, settled, strict=True):
                of_cache.copy_(each)

    monkeypatch.setattr(StaticRecurrentCache, "settle", in_part)
    monkeypatch.setattr(reading, "_READ_LATE", late)
    medusa, inputs = medusa_of("lfm2", whole=True), prompt(12)
    planted(medusa, inputs, BOTH)
    with pytest.raises(UnsupportedArchitecture, match="the states of lfm2 differ by"):
        written(medusa, inputs, max_new_tokens=NEW)


@pytest.mark.slow
def test_a_step_that_is_no_graph_leaves_the_states_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = RecurrentDeviceState.read

    def broken(state: RecurrentDeviceState, *given: Any) -> Any:
        torch._dynamo.graph_break()
        return read(state, *given)

    medusa, inputs = medusa_of("lfm2"), prompt(12)
    expected = planted(medusa, inputs, BOTH)
    monkeypatch.setattr(RecurrentDeviceState, "read", broken)
    with pytest.warns(MedusaWarning, match="the whole is no graph"):
        assert torch.equal(written(medusa, inputs, max_new_tokens=NEW), expected)
    assert "step" not in medusa.last_stats.seconds


def widths_of(monkeypatch: pytest.MonkeyPatch, late: set[str]) -> list[int]:
    """Comes to hold how many tokens each step reads."""
    widths, width = [], RecurrentDeviceState.width

    def noted(state: RecurrentDeviceState, *given: Any) -> int:
        widths.append(width(state, *given))
        return widths[-1]

    monkeypatch.setattr(RecurrentDeviceState, "width", noted)
    monkeypatch.setattr(reading, "_READ_LATE", late)
    return widths


def test_a_row_that_has_ended_has_nothing_to_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    medusa, inputs, widths = medusa_of("lfm2"), padded([0, 3], 12), widths_of(monkeypatch, set())
    whole = planted(medusa, inputs, [4])
    ends: dict[str, Any] = {"eos_token_id": int(whole[0, 14])}
    expected = written(medusa.target.model, inputs, max_new_tokens=NEW, **ends)
    assert torch.equal(text(medusa, inputs, max_new_tokens=NEW, **ends), expected)
    assert len(widths) > 5 and set(widths) == {5}


@pytest.mark.parametrize("truth", [[4], BOTH], ids=["right", "both"])
def test_figures_that_come_late(truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps then have room for what may have to be read again."""
    medusa, inputs, widths = medusa_of("lfm2"), padded([0, 3], 12), widths_of(monkeypatch, {HERE})
    expected = planted(medusa, inputs, truth)
    assert torch.equal(text(medusa, inputs, max_new_tokens=NEW), expected)
    assert set(widths) == {17} and medusa.last_stats.tokens_per_step > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_inductor_writes_the_same(kind: str) -> None:
    medusa, inputs = medusa_of(kind, "inductor"), padded([0, 3, 5], 12)
    assert isinstance(medusa.target, CompiledTarget)
    expected = planted(medusa, inputs, BOTH)
    assert torch.equal(written(medusa, inputs, max_new_tokens=NEW), expected)
    assert medusa.last_stats.seconds["step"]
