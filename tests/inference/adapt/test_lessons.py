"""A process begins with what earlier ones learnt, and new text soon outweighs it."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.inference.adapt.bandit import Allowance, Bandit
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.adapt.evidence import Evidence
from medusa_heads.inference.adapt.lessons import Lessons
from medusa_heads.inference.models.training_free import TrainingFreeModel
from medusa_heads.inference.plan import adaptive
from medusa_heads.machine import measurements
from medusa_heads.machine.measurements import Measurements
from medusa_heads.target.graphs.compiled import CompiledTarget
from tests.conftest import TinyLlama

PRIORS = [0.5, 0.5]


@pytest.fixture(autouse=True)
def no_lessons() -> None:
    """Other tests go without; here they lie in `cache`."""


def begun(name: str = "text", facts: str = "a target") -> tuple[Lessons, Evidence]:
    lessons, evidence = Lessons({"target": facts}), Evidence(PRIORS)
    lessons.go_on(name, evidence.columns)
    return lessons, evidence


def taught(drafts: int, right: bool, name: str = "text") -> None:
    """A process that learns of so many drafts, and ends."""
    lessons, evidence = begun(name)
    for _ in range(drafts):
        evidence.learn(0, float(right))
        lessons.count()
    lessons.write()


def test_a_process_begins_where_the_last_one_ended(cache: Path) -> None:
    taught(500, True)
    _, evidence = begun()
    assert evidence.rate(0) > 0.95 and evidence.rate(1) == 0.5
    assert begun(facts="another target")[1].rate(0) == 0.5
    for _ in range(60):  # the past counts for no more than some steps
        evidence.learn(0, 0.0)
    assert evidence.rate(0) < 0.5


def test_nothing_is_written_where_nothing_was_learnt(cache: Path) -> None:
    taught(0, True)
    assert not cache.exists()


def test_of_two_processes_the_last_one_stays_and_nobody_elses_lessons_go(cache: Path) -> None:
    first, of_first = begun()
    taught(300, True)  # while the first one is still running
    taught(300, True, "heads")
    for _ in range(300):
        of_first.learn(0, 0.0)
        first.count()
    first.write()
    assert begun()[1].rate(0) < 0.05
    assert begun("heads")[1].rate(0) > 0.95


def test_what_a_process_has_written_is_not_written_again(cache: Path) -> None:
    """Unless it learnt more of it: meanwhile others may have."""
    first, of_first = begun()
    heads = Evidence(PRIORS)
    first.go_on("heads", heads.columns)
    of_first.learn(0, 1.0)
    first.count()
    first.write()
    taught(300, False)
    heads.learn(0, 1.0)
    first.count()
    first.write()
    assert begun()[1].rate(0) < 0.05 and begun("heads")[1].rate(0) > 0.5


def test_a_process_that_lives_on_writes_now_and_then(cache: Path) -> None:
    lessons, evidence = begun()
    for _ in range(1100):
        evidence.learn(0, 1.0)
        lessons.count()
    assert begun()[1].rate(0) > 0.9


def test_no_step_waits_for_the_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(descriptor: int) -> None:
        raise AssertionError("lessons are written between two steps")

    monkeypatch.setattr(os, "fsync", waits)
    taught(2000, True)
    assert begun()[1].rate(0) > 0.95


def test_seconds_are_kept_as_plain_steps(cache: Path) -> None:
    """What a busy machine taught holds on an idle one: there all steps are quicker."""
    bandits = []
    for step in (0.5, 0.125):
        lessons, bandit = Lessons({}), Bandit([(0.0, 0.0), (1.0, step)], Allowance(step))
        lessons.go_on("asking", bandit.columns, lambda step=step: step)  # type: ignore[misc]
        bandits.append(bandit.values(1 / step))
        for _ in range(100):
            bandit.learn(1, 0.25, 2 * step)
            lessons.count()
        bandits.append(bandit.values(1 / step))
        lessons.write()
    _, busy, idle, _ = bandits
    assert idle == pytest.approx(busy, abs=1e-3)


@pytest.mark.parametrize(
    "damage",
    [None, 3, "yes", [], [[1.0, 1.0]], [[1.0], [1.0]], [["1", 1.0], [1.0, 1.0]]]
    + [[[1.0, 1.0], [bad, 1.0]] for bad in (0.0, -1.0, 1e300, float("nan"), float("inf"), True)],
)
def test_damaged_lessons_are_learnt_anew(cache: Path, damage: Any) -> None:
    taught(300, True)
    (file,) = (cache / "lessons").iterdir()
    content = json.loads(file.read_text())
    content["values"]["text"] = damage
    file.write_text(json.dumps(content))
    assert begun()[1].rate(0) == 0.5
    taught(300, True)
    assert begun()[1].rate(0) > 0.95


def test_a_model_drafts_with_what_another_learnt(tiny_llama: TinyLlama, cache: Path) -> None:
    """Of greedy and drawn text apart; the text stays what it is without."""
    model: Any = tiny_llama(vocab_size=24)
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    expected_BT = model.generate(ids_BT, **options)
    known: list[list[float]] = []
    for _ in range(2):
        drafted: Any = TrainingFreeModel(model, "auto")
        text = drafted.drafter._text.evidence
        known += [list(text[drawing]._expected) for drawing in ("greedy", "drawn")]
        assert torch.equal(drafted.generate(ids_BT, **options), expected_BT)
        del drafted
        gc.collect()  # a drafter that is gone has written
    greedy, drawn, greedy_later, drawn_later = known
    assert greedy_later != greedy and drawn_later == drawn


def evidence_of(model: Any, drafter: str, **options: Any) -> dict[Any, list[float]]:
    """What the text's, or else the first source's, drafts came to before this process; then it
    drafts, and ends."""
    drafted: Any = TrainingFreeModel(model, drafter, **options)
    own = drafted.drafter._text or drafted.drafter._sources[0]
    known = {key: list(evidence._expected) for key, evidence in own.evidence.items()}
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    drafted.generate(ids_BT, max_new_tokens=40, do_sample=False, pad_token_id=0)
    del drafted, own
    gc.collect()
    return known


def test_each_corpus_teaches_for_itself(tiny_llama: TinyLlama, cache: Path) -> None:
    """What is copied from it is right as often as it is, and no other corpus."""
    model: Any = tiny_llama(vocab_size=24)
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    text = model.generate(ids_BT, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    right, wrong = [text] * 2, [text[::-1]]
    new, again, other = (evidence_of(model, "suffix", corpus=c) for c in (right, right, wrong))
    assert new == other
    for key in ("greedy", ("corpus", "greedy")):
        assert again[key] != new[key]


def test_chains_that_are_drafted_token_by_token_keep_what_they_learn(
    tiny_llama: TinyLlama, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts without other layers are other drafts."""
    monkeypatch.setattr(Bandit, "pick", lambda *_: 1)  # they are asked, also where they do not pay
    model: Any = tiny_llama(num_hidden_layers=3)
    new, again, other = (evidence_of(model, f"early_exit:{n}") for n in (1, 1, 2))
    assert new == other and again["greedy"] != new["greedy"]
    assert again["drawn"] == new["drawn"]


def test_the_clock_decides_of_no_lessons(
    tiny_llama: TinyLlama, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled target verifies a number of nodes that pays by the clock, which varies."""
    target = CompiledTarget(tiny_llama(), "eager")
    for best in (7, 15):
        monkeypatch.setattr(adaptive, "_best_fixed", lambda *_, best=best: best)
        lessons = adaptive.blended(target, clock=Clock.flat())._lessons
        assert lessons is not None
        lessons.go_on("one", ([1.0 * best], [2.0]))
        lessons._learning["one"][0][1][0] = 3.0
        lessons.count()
        lessons.write()
    assert len(list((cache / "lessons").iterdir())) == 1


def test_of_each_kind_the_latest_measurements_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "_MOST", 3)
    store = Measurements(tmp_path)
    for number in range(5):
        store.write("lessons", {"heads": number}, {"text": number})
        for file in (tmp_path / "lessons").iterdir():  # as if it had been a second ago
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 1))
    store.write("clock", {"heads": 0}, {"step": 1})
    kept = [store.read("lessons", {"heads": number}) for number in range(5)]
    assert kept == [None, None, *({"text": number} for number in (2, 3, 4))]
    assert store.read("clock", {"heads": 0}) == {"step": 1}
