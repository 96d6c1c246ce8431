"""Multi-token-prediction modules draft what transformers lets them draft, whatever was accepted
before, and the text stays the target's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from medusa_heads.checkpoint.mtp_checkpoint import read_mtp_sidecar, save_mtp
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters import mtp
from medusa_heads.inference.drafters.mtp import MtpDrafts, MtpText, mtp_source
from medusa_heads.inference.engine.noise import RNGS
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.target.target import TargetModel
from tests.inference.joining import check, guests
from tests.inference.native_modules import (
    KINDS,
    TREES,
    needs_modules,
    read_target,
    write_checkpoint,
)
from tests.inference.padded import padded
from tests.inference.recurrent import written as written_by

pytestmark = [
    needs_modules,
    pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree"),
]
# Modules that are layers behind the last one, as those of deepseek_v3, or beside linear attention.
ALIKE = ("glm4_moe", "qwen3_next")
STEPS = {1: 1.0, 2: 1.02, 4: 1.04, 8: 1.1, 16: 1.2}  # seconds by tokens: drafting pays


@pytest.fixture(autouse=True)
def drafting_pays(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A machine on which drafting pays, as it does not on a model this small."""
    monkeypatch.setattr(mtp, "target_clock", lambda *_: clock_of(0.01))


def clock_of(token: float) -> Clock:
    """Drafted tokens take as long as said, whatever this machine does besides."""
    names = [f"{name} of {rows}" for name in ("mtp", "a token of mtp") for rows in (1, 2, 3, 4)]
    return Clock(STEPS, dict.fromkeys((mtp._ALL, *names), token), learns=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_checkpoint(kind, tmp_path_factory.mktemp("target") / kind) for kind in KINDS
    }


@pytest.fixture(scope="module")
def targets(folders: dict[str, Path]) -> dict[str, TargetModel]:
    return {kind: read_target(folder) for kind, folder in folders.items()}


def prompts(rows: int) -> dict[str, Any]:
    return padded((0, 4, 9, 2)[:rows], 13, range(3, 190))


def written(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return written_by(model, inputs, **{"max_new_tokens": 32} | options)


DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.3, "top_k": 0}
PENAL: dict[str, Any] = {"repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param(k, {}, marks=[pytest.mark.slow] * (k in ALIKE)) for k in KINDS),
        ("deepseek_v3", DRAWN),
        pytest.param("qwen3_next", DRAWN | PENAL, marks=pytest.mark.slow),
    ],
)
def test_equals_generate(
    targets: dict[str, TargetModel], kind: str, options: dict[str, Any]
) -> None:
    target = targets[kind]
    for drafter in ("mtp", "mtp+suffix") if kind == "deepseek_v3" else ("mtp+suffix",):
        model = TrainingFreeModel(target, drafter, rng="transformers")
        expected_BT = written(target.model, prompts(1), **options)
        assert torch.equal(written(model, prompts(1), **options), expected_BT)
        assert model.last_stats.tokens_per_step > 1.2


def test_modules_draft_what_is_about_to_be_drawn(targets: dict[str, TargetModel]) -> None:
    """At a temperature at which the likeliest token is seldom the one that is drawn."""
    tokens_per_step, texts, hot = {}, {}, DRAWN | {"temperature": 2.0}
    for rng in RNGS:
        model = TrainingFreeModel(targets["deepseek_v3"], "mtp", rng=rng)
        texts[rng] = written(model, prompts(4), **hot)
        tokens_per_step[rng] = model.last_stats.tokens_per_step
    assert tokens_per_step["keyed"] > 1.2 * tokens_per_step["transformers"]
    undrafted = TrainingFreeModel(targets["deepseek_v3"], "suffix")
    assert torch.equal(written(undrafted, prompts(4), **hot), texts["keyed"])


def test_modules_that_know_nothing_change_no_text(tmp_path: Path) -> None:
    target = read_target(write_checkpoint("deepseek_v3", tmp_path, right=False))
    model = TrainingFreeModel(target, "mtp")
    assert torch.equal(written(model, prompts(1)), written(target.model, prompts(1)))
    assert model.last_stats.tokens_per_step < 1.25


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ALIKE else ()) for kind in TREES]
)
def test_rows_of_a_batch_equal_generate(targets: dict[str, TargetModel], kind: str) -> None:
    target = targets[kind]
    options = {"eos_token_id": int(written(target.model, prompts(4))[1, 30])}
    for drafter in ("mtp", "mtp+suffix") if kind == "deepseek_v3" else ("mtp",):
        model = TrainingFreeModel(target, drafter)
        expected_BT = written(target.model, prompts(4), **options)
        assert torch.equal(written(model, prompts(4), **options), expected_BT)
        assert model.last_stats.tokens_per_step > 1.2


@pytest.mark.usefixtures("untraced")
def test_rows_that_stay_in_a_compiled_batch(targets: dict[str, TargetModel]) -> None:
    target = targets["deepseek_v3"]
    options = {"eos_token_id": int(written(target.model, prompts(3))[1, 30])}
    model = TrainingFreeModel(target, "mtp", compile=True, deterministic=True)
    expected_BT = written(target.model, prompts(3), **options)
    assert torch.equal(written(model, prompts(3), **options), expected_BT)
    assert model.last_stats.tokens_per_step > 1.5


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("deepseek_v3", False),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("deepseek_v3", "glm4_moe")),
    ],
)
def test_drafts_are_those_of_transformers(
    kind: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every length of the text that both come by; the second of two modules is corrected there
    behind refused drafts, too."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    target, number = read_target(write_checkpoint(kind, tmp_path, right=right)), KINDS[kind][0]
    theirs: dict[int, list[int]] = {}
    ours: dict[int, list[int]] = {}
    get = MTPCandidateGenerator.get_candidates

    def get_and_note(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids, logits = get(self, input_ids, *args, **kwargs)
        theirs[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    advance = MtpText.advance

    def advance_and_note(self: MtpText, state: DecodingState) -> Any:
        levels = advance(self, state)
        ours[state.rows[0].length] = [int(tokens_BR[0, 0]) for tokens_BR, _ in levels]
        return levels

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_and_note)
    monkeypatch.setattr(MtpText, "advance", advance_and_note)
    # By itself it knows the modules of those sizes alone that were released.
    known: Any = target.model._keys_to_ignore_on_load_unexpected
    known.add(r"^model\.layers\.[23]\.")
    expected_BT = written(target.model, prompts(1), max_new_tokens=110, use_mtp=True)
    model = TrainingFreeModel(target, "mtp", deterministic=True)
    got_BT = written(model, prompts(1), max_new_tokens=110)
    assert torch.equal(got_BT, expected_BT)
    common = sorted(set(theirs) & set(ours))[1:-1]  # before the prompt is read none is drafted
    assert len(common) > 5
    assert {at: ours[at] for at in common} == {at: theirs[at][:number] for at in common}
    refused = [at for at in common if ours[at] != expected_BT[0, at : at + number].tolist()]
    assert refused or number == 1


@pytest.mark.parametrize(
    "kind",
    [
        # What the others keep of a text, texts that are decoded show above.
        pytest.param(kind, marks=() if kind == "deepseek_v3" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_what_is_remembered_is_what_is_read_anew(
    targets: dict[str, TargetModel], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains behind the same text are the same, whatever was accepted on the way to it; of padded
    rows, too. Each goes on behind its last module."""
    target, rows = targets[kind], 3 if kind in TREES else 1
    continuation, compared = MtpDrafts.continuation, []

    def compare(self: MtpDrafts, state: DecodingState) -> Any:
        chains = continuation(self, state)
        anew = [_read_anew(self, state, b) for b in range(len(state.rows))]
        levels = [next(chains) for _ in range(4)]
        for tokens_BR, probs_BR in levels:
            for b, chain in enumerate(anew):
                (tokens_R,), (probs_R,) = next(chain)
                assert tokens_BR[b][0] == tokens_R[0]
                assert probs_BR[b] == pytest.approx(probs_R, rel=1e-3, abs=1e-5)
                compared.append(b)
        yield from levels

    def _read_anew(self: MtpDrafts, state: DecodingState, b: int) -> Any:
        row = state.rows[b]
        ids_1T = row.ids_1T()[:, state.padding[b] :]
        alone: Any = DecodingState.__new__(DecodingState)
        alone.noise = None
        alone.rows, alone.memories = [row], {}
        alone._fresh = [(target.hidden(ids_1T[:, :-1]), [list(range(ids_1T.shape[1] - 1))])]
        return continuation(self, alone)

    monkeypatch.setattr(MtpDrafts, "continuation", compare)
    model = TrainingFreeModel(target, "mtp")
    expected_BT = written(target.model, prompts(rows), max_new_tokens=32)
    assert torch.equal(written(model, prompts(rows), max_new_tokens=32), expected_BT)
    assert compared.count(rows - 1) > 20 and model.last_stats.tokens_per_step > 1.3
    assert len(model.last_stats.accepted) > 1
    if kind == "deepseek_v3":  # rows that come and go
        compared.clear()
        visitors = guests(9, {"do_sample": False}, tokens=range(3, 190))
        check(model.running_batch(3), visitors, target.model)
        assert compared.count(2) > 10


def test_the_modules_are_asked_only_where_they_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that are never right are tried now and then, and not drafted from."""
    target = read_target(write_checkpoint("qwen3_5_text", tmp_path, right=False))
    asked = []
    advance = MtpText.advance

    def count(self: MtpText, state: DecodingState) -> Any:
        asked.append(len(state.rows))
        return advance(self, state)

    monkeypatch.setattr(MtpText, "advance", count)
    monkeypatch.setattr(mtp, "target_clock", lambda *_: clock_of(0.5))
    model = TrainingFreeModel(target, "mtp")
    expected_BT = written(target.model, prompts(1), max_new_tokens=120)
    assert torch.equal(written(model, prompts(1), max_new_tokens=120), expected_BT)
    assert 0 < len(asked) < 50


def test_modules_that_were_trained_learn_for_themselves(
    targets: dict[str, TargetModel], tmp_path: Path
) -> None:
    """What the target's own ones teach says little of them."""
    target = targets["glm4_moe"]
    own = MtpDrafts(target)
    trained = MtpDrafts(target, save_mtp(tmp_path / "modules", own.modules, target))
    sources = [mtp_source(drafts, 3, clock_of(0.01))[0] for drafts in (own, trained)]
    digest = read_mtp_sidecar(tmp_path / "modules")["weights_sha256"]
    assert [source.facts for source in sources] == [{"modules": None}, {"modules": digest}]


def test_always_the_same_steps(targets: dict[str, TargetModel]) -> None:
    model = TrainingFreeModel(targets["glm4_moe"], "mtp+suffix", deterministic=True)
    expected_BT = written(targets["glm4_moe"].model, prompts(1))
    accepted = []
    for _ in range(2):
        assert torch.equal(written(model, prompts(1)), expected_BT)
        accepted.append(model.last_stats.accepted)
    assert accepted[0] == accepted[1]


def test_what_drafting_takes_is_measured(
    targets: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    drafts = MtpDrafts(targets["deepseek_v3"])
    source, clock = mtp.mtp_source(drafts, 7, None)
    assert clock.drafting(mtp._ALL) > 0
    assert source.expected(7) > 1 and source.reads_prompt


def test_texts_end_at_the_last_position(tmp_path: Path) -> None:
    target = read_target(write_checkpoint("glm4_moe", tmp_path))
    limit = int(target.max_positions or 0)
    given = padded((0,), limit - 20, range(3, 190))
    options = {"max_new_tokens": 20, "generation_config": GenerationConfig(pad_token_id=0)}
    expected_BT = written(target.model, given, **options)
    model = TrainingFreeModel(target, "mtp")
    assert torch.equal(written(model, given, **options), expected_BT)
    assert expected_BT.shape[1] == limit
