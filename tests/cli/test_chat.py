"""`medusa-heads chat`: its answers are plain generate()'s on the whole conversation."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from medusa_heads import TargetModel
from medusa_heads.cli.chat import main
from medusa_heads.draft_checkpoint import save_draft
from medusa_heads.inference.training_free import DRAFTERS

FAITHFUL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As templates of thinking models do: of earlier answers only a part is shown again.
SHORTENED = FAITHFUL.replace(
    "{{ m.content }}",
    "{{ m.content[:7] if m.role == 'assistant' else m.content }}",
)
LINES = ["hello there", "and then?", "bye"]


@pytest.fixture(params=[FAITHFUL, SHORTENED, None], ids=["faithful", "shortened", "none"])
def template(request: pytest.FixtureRequest, speaker: Path) -> Any:
    """Installs a chat template beside the target for the time of a test."""
    return install(speaker, request.param)


def install(speaker: Path, template: str | None) -> str | None:
    tokenizer: Any = AutoTokenizer.from_pretrained(speaker / "target")
    tokenizer.chat_template = template
    (speaker / "target" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(speaker / "target")
    return template


def talk(
    speaker: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *flags: str, limit: int = 24
) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return main([str(speaker / "heads"), "--max-new-tokens", str(limit), *flags])


def plain_answers(
    speaker: Path, template: str | None, lines: list[str], **options: Any
) -> list[str]:
    """Every turn anew: the whole conversation rendered, then transformers' own generate()."""
    model: Any = TargetModel.from_pretrained(str(speaker / "target")).model
    tokenizer: Any = AutoTokenizer.from_pretrained(speaker / "target")
    messages: list[dict[str, str]] = []
    text = ""
    answers = []
    for turn, line in enumerate(lines):
        messages.append({"role": "user", "content": line})
        if template is None:
            text += line if not text or text.endswith("\n") else "\n" + line
        else:
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        torch.manual_seed(turn)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **options)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :]))
        messages.append({"role": "assistant", "content": answers[-1]})
        text += answers[-1]
    return answers


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"do_sample": False}),
        (["--temperature", "0.8"], {"do_sample": True, "temperature": 0.8}),
    ],
)
def test_keeping_the_cache_changes_nothing(
    template: str | None,
    flags: list[str],
    options: Any,
    speaker: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = [line for spoken in LINES for line in (spoken, "/stats")]
    assert talk(speaker, script, monkeypatch, *flags) == 0
    printed = capsys.readouterr()
    answers = plain_answers(speaker, template, LINES, **options)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    assert ("has no chat template" in printed.err) == (template is None)
    prompts = [
        tuple(map(int, pair))
        for pair in re.findall(r"prompt: (\d+) tokens, (\d+) of them in the cache", printed.err)
    ]
    assert len(prompts) == 3 and prompts[0][1] == 0
    for (before, _), (_, cached) in pairwise(prompts):
        # All but the last token's row, or up to where the template tells it differently.
        assert cached == before + (7 if template == SHORTENED else 23)


def test_a_target_that_drafts_for_itself(
    speaker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(speaker, FAITHFUL)
    script = [LINES[0], "/set drafter suffix", LINES[1], "/set drafter none", "/set tree chain"]
    script += ["/set drafter best", LINES[2]]
    flags = ["--drafter", "recycling", "--max-new-tokens", "24"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in script)))
    assert main([str(speaker / "target"), *flags]) == 0
    printed = capsys.readouterr()
    answers = plain_answers(speaker, FAITHFUL, LINES, do_sample=False)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    told = [
        "a drafter drafts in this chat",
        "a tree is of heads or a draft model, with --drafter there is neither",
        f"drafter must be one of {', '.join(DRAFTERS)}, ",
    ]
    for line, message in zip(printed.err.splitlines(), told, strict=True):
        assert line.startswith(f"error: {message}")


def test_a_draft_model_drafts(
    speaker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain model folder, named as a flag, and one that names its target, alone."""
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
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
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in script)))
        assert main([*given, "--max-new-tokens", "24"]) == 0
        printed = capsys.readouterr()
        assert printed.out == "".join(answer + "\n" for answer in answers)
        assert "error: a draft model drafts in this chat: begin another one" in printed.err
        assert "error: a draft model's tree must be auto, chain," in printed.err
        assert "error: unknown setting 'draft_model'" in printed.err
        assert ("steps drafted: " in printed.err) == (len(given) > 1)


def test_drafts_continue_a_corpus(
    speaker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))
    install(speaker, FAITHFUL)
    answers = plain_answers(speaker, FAITHFUL, LINES, do_sample=False)
    corpus = tmp_path / "answers.txt"
    corpus.write_text("\n".join(answers), encoding="utf-8")
    script = [LINES[0], "/set corpus nowhere", f"/set corpus {corpus}", LINES[1], LINES[2]]
    assert talk(speaker, script, monkeypatch, "--tree", "suffix", "--stats") == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(answer + "\n" for answer in answers)
    assert "error: expected a corpus at 'nowhere', a file or a folder, found nothing" in printed.err
    without, *with_corpus = map(float, re.findall(r"\((\S+) tokens per step", printed.err))
    assert min(with_corpus) > without


def test_reset_save_and_set(
    speaker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(speaker, FAITHFUL)
    saved = tmp_path / "talk.json"
    script = [
        *("/stats", "first", "/reset", "", "/set max-new-tokens 24", "/set tree chain"),
        *("/set do_sample yes", "/set top_k 3", "/set", "/set do_sample no", "/set top_k none"),
        *("hello there", f"/save {saved}", "/set group true", "and then?"),
        *("/set group no", "/set stop <", "/help", "/quit", "never said"),
    ]
    assert talk(speaker, script, monkeypatch, limit=5) == 0
    printed = capsys.readouterr()
    expected = plain_answers(speaker, FAITHFUL, LINES[:2], do_sample=False)
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": expected[0]},
    ]
    first, rest = printed.out[:6], printed.out[6:]
    assert first.endswith("\n")
    assert re.sub(r"[\[\]]", "", rest) == "".join(answer + "\n" for answer in expected)
    assert rest.count("[") > 1 and "\ntop_k 3\n" in printed.err and "/reset" in printed.err
    assert "error: nothing has been answered yet" in printed.err
    assert printed.err.count("error") == 1


def test_mistakes_in_a_conversation_do_not_end_it(
    speaker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(speaker, FAITHFUL)
    mistakes = {
        "/frobnicate": "unknown command /frobnicate; /help lists them",
        "/set temprature 1": "unknown setting 'temprature'; did you mean 'temperature'?",
        "/set temperature hot": "temperature must be of type float, got 'hot'",
        "/set top_p 7": "top_p must be above 0 and at most 1",
        "/set acceptance loose": "acceptance must be one of",
        "/set tau 1": "lossless acceptance has no setting",
        "/set tree 0": "at least 1 drafted node",
        "/set drafter suffix": "heads draft in this chat",
        "/set checkpoint x": "unknown setting 'checkpoint'",
        "/save": "/save needs the name of a file",
        f"/save {tmp_path}/no/where.json": "No such file",
        "x" * 600: "/reset starts a new one",
    }
    assert talk(speaker, ["hello there", *mistakes, "and then?"], monkeypatch) == 0
    printed = capsys.readouterr()
    answers = plain_answers(speaker, FAITHFUL, LINES[:2], do_sample=False)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    told = printed.err.splitlines()
    assert len(told) == len(mistakes)
    for line, message in zip(told, mistakes.values(), strict=True):
        assert line.startswith("error: ") and message in line


class Interrupting(io.StringIO):
    """Standard output on whose third piece somebody presses Ctrl-C."""

    pieces = 0

    def write(self, text: str) -> int:
        self.pieces += 1
        if self.pieces == 3:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Ctrl-C as at a terminal: a shell's background jobs are born ignoring it."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("keyboard")
def test_ctrl_c_stops_the_answer_and_not_the_chat(
    speaker: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(speaker, FAITHFUL)
    saved = tmp_path / "talk.json"
    screen = Interrupting()
    monkeypatch.setattr("sys.stdout", screen)
    script = ["hello there", "/stats", "and then?", f"/save {saved}"]
    assert talk(speaker, script, monkeypatch) == 0
    assert "(stopped)" in capsys.readouterr().err
    messages = json.loads(saved.read_text())["messages"]
    stopped, answered = messages[1]["content"], messages[3]["content"]
    whole = plain_answers(speaker, FAITHFUL, LINES[:1], do_sample=False)[0]
    assert 0 < len(stopped) < 24 and whole.startswith(stopped)
    tokenizer: Any = AutoTokenizer.from_pretrained(speaker / "target")
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    model: Any = TargetModel.from_pretrained(str(speaker / "target")).model
    out = model.generate(torch.tensor([tokenizer(prompt)["input_ids"]]), max_new_tokens=24)
    assert tokenizer.decode(out[0]) == prompt + answered
    assert screen.getvalue().endswith(answered + "\n")


def test_a_template_that_refuses(
    speaker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(speaker, "{{ raise_exception('only the user may speak') }}")
    assert talk(speaker, ["hello"], monkeypatch, "--system", "be brief") == 0
    assert "error: the target's chat template refuses this: only the user may speak" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "expected a heads checkpoint"),
        (["{}/heads", "--target", "nowhere"], "expected a causal language model"),
        (["{}/heads", "--temprature", "1"], "did you mean '--temperature'"),
        (["{}/heads", "--prompt", "x"], "unknown argument '--prompt'"),
        (["{}/heads", "--typical-p", "0"], "typical_p must be above 0"),
        (["{}/heads", "--acceptance", "typical", "--tau", "1"], "has no setting ['tau']"),
        ([], "--checkpoint is missing"),
        (["{}/heads", "--drafter", "auto"], "holds heads, and --drafter drafts without any"),
        (["{}/target", "--drafter", "auto", "--tree", "chain"], "with --drafter there is neither"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, speaker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag.format(speaker) for flag in flags]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1
