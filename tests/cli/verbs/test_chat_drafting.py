"""What drafts in `medusa-heads chat`, and how to change it; answers stay plain generate()'s."""

from __future__ import annotations

import re
from pathlib import Path

from medusa_heads import TargetModel
from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.inference.models.training_free import DRAFTERS
from tests.cli.conftest import Talk
from tests.cli.verbs.chatting import FAITHFUL, LINES, install, plain_answers


def test_a_target_that_drafts_for_itself(speaker: Path, talk: Talk) -> None:
    install(speaker, FAITHFUL)
    script = [LINES[0], "/set drafter suffix", LINES[1], "/set drafter none", "/set tree chain"]
    script += ["/set drafter best", LINES[2]]
    printed = talk(speaker / "target", script, "--drafter", "recycling")
    answers = plain_answers(speaker, FAITHFUL, LINES, do_sample=False)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    told = [
        "a drafter drafts in this chat",
        "a tree is of heads or a draft model, with --drafter there is neither",
        f"drafter must be one of {', '.join(DRAFTERS)}, ",
    ]
    first, *lines = printed.err.splitlines()
    assert first.startswith("target: ")  # what is computed with
    for line, message in zip(lines, told, strict=True):
        assert line.startswith(f"error: {message}")


def test_a_draft_model_drafts(speaker: Path, tmp_path: Path, talk: Talk) -> None:
    """A plain model folder, named as a flag, and one that names its target, alone."""
    install(speaker, FAITHFUL)
    target = TargetModel.from_pretrained(str(speaker / "target"))
    save_draft(tmp_path / "draft", target.model, target)
    answers = plain_answers(speaker, FAITHFUL, LINES, do_sample=False)
    script = [LINES[0], "/set drafter auto", "/set tree chain:2", LINES[1], "/set tree 5"]
    script += ["/set draft_model x", LINES[2], "/stats"]
    for given in (
        [str(tmp_path / "draft")],
        [
            str(speaker / "target"),
            "--draft-model",
            str(speaker / "target"),
            str(tmp_path / "draft"),
        ],
    ):
        printed = talk(given, script)
        assert printed.out == "".join(answer + "\n" for answer in answers)
        assert "error: a draft model drafts in this chat: begin another one" in printed.err
        assert "error: a draft model's tree must be auto, chain," in printed.err
        assert "error: unknown setting 'draft_model'" in printed.err
        assert ("steps drafted: " in printed.err) == (len(given) > 1)


def test_drafts_continue_a_corpus(speaker: Path, tmp_path: Path, talk: Talk) -> None:
    install(speaker, FAITHFUL)
    answers = plain_answers(speaker, FAITHFUL, LINES, do_sample=False)
    corpus = tmp_path / "answers.txt"
    corpus.write_text("\n".join(answers), encoding="utf-8")
    script = [LINES[0], "/set corpus nowhere", f"/set corpus {corpus}", LINES[1], LINES[2]]
    printed = talk(speaker / "heads", script, "--tree", "suffix", "--stats")
    assert printed.out == "".join(answer + "\n" for answer in answers)
    assert "error: expected a corpus at 'nowhere', a file or a folder, found nothing" in printed.err
    without, *with_corpus = map(float, re.findall(r"\((\S+) tokens per step", printed.err))
    assert min(with_corpus) > without
