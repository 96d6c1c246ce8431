"""The proof of tokens in small: texts of three architectures, every fault, ties, resuming."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.prove.lossless import records
from scripts.prove.lossless.cases import Record, caught
from scripts.prove.lossless.comparison import compare
from scripts.prove.lossless.corpus import SPREAD, processed, usual
from scripts.prove.lossless.faults import FAULTS, Fault
from scripts.prove.lossless.page import write_section
from scripts.prove.lossless.records import Records, Summary
from scripts.prove.lossless.targets import ProofTarget, processors_target, random_target
from scripts.prove.lossless.texts import Reference, Text
from scripts.prove.lossless.ways import HEADS, every_way, planted
from scripts.prove.tokens import main
from tests.conftest import Refused

NEW = 24


def prove(folder: Path, *flags: str) -> int:
    out = ["--out", str(folder), "--report", str(folder / "page.md")]
    return main([*out, "--new_tokens", str(NEW), *flags])


def test_mistakes_are_one_sentence(tmp_path: Path, refused: Refused) -> None:
    for flags, sentence in (
        (["--targets", "lama"], "targets knows no 'lama': did you mean 'llama'?"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
    ):
        assert sentence in refused(main, ["--out", str(tmp_path), *flags])


@pytest.mark.slow
def test_three_architectures_hold_and_are_not_run_again(tmp_path: Path) -> None:
    flags = ["--targets", "llama", "gpt2", "bloom", "recurrent_gemma", "--tokens", "2000"]
    assert prove(tmp_path, *flags) == 0
    records = Records(tmp_path, str(NEW))
    whole = records.file.read_text()
    summary = records.read()
    assert summary.tokens > 2000 and summary.mismatches == 0 and not summary.failed
    assert len({record.group for record in summary.compared}) == 5
    assert len(summary.broken) > 30 and not summary.unnoticed
    assert summary.left_out == {"refused": 1}  # recurrent_gemma
    page = (tmp_path / "page.md").read_text()
    assert f"**{summary.tokens:,} tokens compared, 0 mismatches" in page
    # Stopped in the middle of a line: that case is run again, and no other.
    lines = whole.splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"llama / 0 / greedy / done"' in line)
    records.file.write_text("".join(lines[:cut]) + lines[cut][:30])
    assert prove(tmp_path, *flags) == 0
    assert Records(tmp_path, str(NEW)).read().known == summary.known
    assert records.file.read_text().startswith("".join(lines[:cut]))
    assert Records(tmp_path, str(NEW)).read().tokens == summary.tokens


@pytest.fixture(scope="module")
def target() -> ProofTarget:
    return random_target("llama", (0.15, 0.15))


OTHERS = {  # of a target that keeps more than rows; quick tests of the engine notice them, too
    "state not put back": "qwen3_next",
    "convolution not put back": "qwen3_next",
    "all rows put back": "qwen3_next",
    "stale snapshot": "qwen3_next",
    "index not dropped": "deepseek_v32",
}


@pytest.fixture(scope="module")
def made(target: ProofTarget) -> list[Reference]:
    return references(target)


def references(target: ProofTarget) -> list[Reference]:
    return [Reference(text, target.model) for text in usual(target, "tiny", 0, 32)]


@cache
def another(kind: str) -> tuple[ProofTarget, list[Reference]]:
    return (target := random_target(kind, (0.15, 0.15))), references(target)


def names(made: list[Reference]) -> list[str]:
    return [reference.text.name for reference in made]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.slow] * (f.name in OTHERS), id=f.name) for f in FAULTS],
)
def test_every_fault_is_noticed_in_all_texts(
    fault: Fault, target: ProofTarget, made: list[Reference]
) -> None:
    if fault.name in OTHERS:
        target, made = another(OTHERS[fault.name])
    matter = [reference for reference in made if fault.matters(target, reference)]
    assert matter and all(caught(fault, target, reference) for reference in matter)


def test_a_fault_that_breaks_nothing_goes_unnoticed(
    target: ProofTarget, made: list[Reference]
) -> None:
    harmless = Fault("none", nullcontext, lambda target, made: True)
    assert not any(caught(harmless, target, reference) for reference in made)


def test_what_a_token_was_chosen_from_is_known_again(made: list[Reference]) -> None:
    for reference in made:
        row = len(reference.rows) - 1
        for place in (0, len(reference.rows[row]) - 1):
            best = reference.two_best(row, place)
            assert best is not None and best.best == reference.rows[row][place]
            assert best.second != best.best and best.gap >= 0


def test_only_the_other_of_two_equal_tokens_is_a_tie(target: ProofTarget) -> None:
    text = Text("twins", "", target.prompts(1, 3), lambda: {"do_sample": False}, 12)
    place = 5
    token = Reference(text, target.model).rows[0][place]
    twin = 198 if token != 198 else 197
    weight = target.model.lm_head.weight
    own = weight[twin].clone()
    with torch.no_grad():
        weight[twin] = weight[token]
    try:
        made = Reference(text, target.model)
        got_BT = made.sequences_BT.clone()
        assert compare(made, got_BT).tokens == 12
        at = made.prompt_length + place
        other = ({token, twin} - {int(got_BT[0, at])}).pop()
        got_BT[0, at] = other
        found = compare(made, got_BT)
        assert (found.tokens, found.mismatches, found.ties) == (place, 0, 1)
        assert found.gaps == [pytest.approx(0.0, abs=1e-6)]
        got_BT[0, at] = (other + 1) % 190
        found = compare(made, got_BT)
        assert (found.tokens, found.mismatches, found.ties) == (12, 12 - place, 0)
        assert found.where is not None and found.where[:2] == (0, place)
    finally:
        with torch.no_grad():
            weight[twin] = own


def test_rows_that_draw_in_step_are_compared_up_to_the_first_tie(target: ProofTarget) -> None:
    place = 5
    alone = target.prompts(1, 3)
    text = Text("twins", "", alone, lambda: {"do_sample": False}, 12)
    token = Reference(text, target.model).rows[0][place]
    twin = 198 if token != 198 else 197
    weight = target.model.lm_head.weight
    own = weight[twin].clone()
    with torch.no_grad():
        weight[twin] = weight[token]
    try:
        pair = {name: torch.cat([rows_1T, rows_1T]) for name, rows_1T in alone.items()}
        for in_step, mismatches in ((True, 0), (False, 3)):
            made = Reference(replace(text, inputs=pair, in_step=in_step), target.model)
            got_BT = made.sequences_BT.clone()
            at = made.prompt_length + place
            got_BT[0, at] = ({token, twin} - {int(got_BT[0, at])}).pop()
            got_BT[1, at + 4] = (got_BT[1, at + 4] + 1) % 190  # behind the other row's tie
            found = compare(made, got_BT)
            assert (found.ties, found.mismatches) == (1, mismatches)
            assert found.tokens == place + (place + 1 if in_step else 12)
            got_BT[1, at - 1] = (got_BT[1, at - 1] + 1) % 190  # and one before it
            assert compare(made, got_BT).mismatches == 12 - (place - 1)
    finally:
        with torch.no_grad():
            weight[twin] = own


def test_what_stands_behind_an_end_is_compared(made: list[Reference]) -> None:
    ends = next(r for r in made if r.text.name == "greedy, batch of 8")
    row = next(row for row, tokens in enumerate(ends.rows) if len(tokens) < 28)
    got_BT = ends.sequences_BT.clone()
    got_BT[row, -1] = 7
    assert compare(ends, got_BT).mismatches == 1
    assert compare(ends, ends.sequences_BT[:, :-1]).mismatches > 0
    wider_BT = torch.nn.functional.pad(ends.sequences_BT, (0, 1))
    assert compare(ends, wider_BT).mismatches == 1


def test_rows_draw_the_same_alone_as_in_a_batch(target: ProofTarget) -> None:
    text = next(t for t in usual(target, "tiny", 0, 16) if t.own_draws)
    options = text.options()
    (own,) = options["logits_processor"]
    scores_BV = torch.randn(8, 199, generator=torch.Generator().manual_seed(0))
    ids_BT = torch.zeros(8, 30, dtype=torch.long)
    whole_BV = own(ids_BT, scores_BV)
    rows = [own.of_row(row)(ids_BT[:1], scores_BV[row, None]) for row in range(8)]
    assert torch.equal(whole_BV, torch.cat(rows))
    assert len(set(whole_BV.argmax(dim=-1).tolist())) > 1


GOOD = Record("a / greedy / way", "a", "g", way="planted", rows=1, tokens=50, tokens_per_step=2.0)
SEEN = Record("a / greedy / fault: x", "a", "g", fault="x", caught="difference")


@pytest.mark.parametrize(
    ("wrong", "holds"),
    [
        ({}, True),
        ({"mismatches": 1}, False),
        ({"failed": "out of memory"}, False),
        ({"tokens": 49}, False),
        ({"ties": 1, "gaps": [1e-6]}, True),
    ],
)
def test_what_holds(wrong: dict[str, Any], holds: bool) -> None:
    assert Summary([replace(GOOD, **wrong), SEEN]).holds(50) is holds


def test_an_unnoticed_fault_or_none_is_no_proof() -> None:
    assert not Summary([GOOD, replace(SEEN, caught="")]).holds(50)
    assert not Summary([GOOD]).holds(50)


def test_a_section_is_replaced_and_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "proofs.md"
    write_section(page, "Tokens", "one\n")
    page.write_text(page.read_text() + "\n## Kills\n\ntwo\n")
    write_section(page, "Tokens", "three\n")
    assert page.read_text() == "# Proofs\n\n## Tokens\n\nthree\n\n## Kills\n\ntwo\n"


def test_processors_of_every_kind_have_texts() -> None:
    made = list(processed(processors_target(), 0, 8))
    assert {text.batch for text in made} == {1, 2, 4}
    assert len({text.name for text in made}) == len(made) > 100


def test_every_turn_has_drafters_also_where_tokens_are_few() -> None:
    target = processors_target()
    ways = [way for turn in range(len(HEADS)) for way in every_way(target, turn)]
    assert {way.family for way in ways} == {
        *("random trees", "random heads", "no training", "draft model")
    }
    assert {kind for kind in HEADS for way in ways if way.name.startswith(kind)} == set(HEADS)


@pytest.mark.slow
def test_heads_of_every_kind_write_the_text(target: ProofTarget, made: list[Reference]) -> None:
    for turn in range(len(HEADS)):
        for way in every_way(target, turn):
            if way.family == "random heads" and way.suits(made[0]):
                assert not compare(made[0], way.decode(made[0])[0]).mismatches, way.name


def test_scripts_write_texts_of_one_row(target: ProofTarget, made: list[Reference]) -> None:
    by_scripts = planted(target, scripted=target.scripted)
    suited = [text for text in made if by_scripts.suits(text)]
    assert suited and all(text.text.batch == 1 for text in suited)
    for text in suited:
        assert not compare(text, by_scripts.decode(text)[0]).mismatches
    assert target.scripted is not None and not target.scripted.gave_up
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain_alone = random_target("bloom", (0.15, 0.15))
    assert chain_alone.scripted is None  # in a cache of fixed size its bias is another one


def test_random_targets_draw_what_their_text_says(target: ProofTarget) -> None:
    """However little their logits differ."""
    text = next(t for t in usual(target, "tiny", 0, 8) if t.sampled)
    assert text.first["temperature"] == pytest.approx(0.7 * target.spread / SPREAD)
    assert 0.1 < target.spread < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["processors", "demo"])
def test_the_heaviest_targets_hold(name: str, tmp_path: Path) -> None:
    assert main(["--targets", name, "--tokens", "5000", "--out", str(tmp_path)]) == 0


def test_a_file_that_changes_meanwhile_takes_no_record_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process runs what it has imported; the next one has records of its own."""
    (tmp_path / "scripts").mkdir()
    monkeypatch.setattr(records, "ROOT", tmp_path)
    files = []
    for source, next_process in (("a = 1", True), ("a = 2", False), ("a = 2", True)):
        (tmp_path / "scripts" / "one.py").write_text(source)
        if next_process:
            records.sources_digest.cache_clear()
        files.append(records.Records(tmp_path, "x").file)
    records.sources_digest.cache_clear()
    assert files[0] == files[1] != files[2]
