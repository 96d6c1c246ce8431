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
from medusa_heads.cli.verbs.chat import main
from medusa_heads.cli.verbs.generate import main as generate
from tests.cli.conftest import Talk
from tests.cli.verbs.chatting import FAITHFUL, LINES, SHORTENED, install, plain_answers
from tests.conftest import Refused, TinyLlama
from tests.inference.speaking import END, save_speaker
from tests.pairs import alternately


@pytest.fixture(params=[FAITHFUL, SHORTENED, None], ids=["faithful", "shortened", "none"])
def template(request: pytest.FixtureRequest, speaker: Path) -> Any:
    """Installs a chat template beside the target for the time of a test."""
    return install(speaker, request.param)


@pytest.mark.parametrize(
    ("template", "drawn"),
    alternately([FAITHFUL, SHORTENED, None], [False, True], slow=[None]),
    indirect=["template"],
)
def test_keeping_the_cache_changes_nothing(
    template: str | None, drawn: bool, speaker: Path, talk: Talk
) -> None:
    flags = ["--temperature", "0.8", "--rng", "transformers"] if drawn else []
    options: Any = {"do_sample": drawn} | ({"temperature": 0.8} if drawn else {})
    script = [line for spoken in LINES for line in (spoken, "/stats")]
    printed = talk(speaker / "heads", script, *flags)
    answers = plain_answers(speaker, template, LINES, **options)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    for said in ("has no chat template", "into its folder as chat_template.jinja"):
        assert (said in printed.err) == (template is None)
    prompts = [
        tuple(map(int, pair))
        for pair in re.findall(r"prompt: (\d+) tokens, (\d+) of them in the cache", printed.err)
    ]
    assert len(prompts) == 3 and prompts[0][1] == 0
    for (before, _), (_, cached) in pairwise(prompts):
        # All but the last token's row, or up to where the template tells it differently.
        assert cached == before + (7 if template == SHORTENED else 23)


def test_reset_save_and_set(speaker: Path, tmp_path: Path, talk: Talk) -> None:
    install(speaker, FAITHFUL)
    saved = tmp_path / "talk.json"
    script = [
        *("/stats", "first", "/reset", "", "/set max-new-tokens 24", "/set tree chain"),
        *("/set do_sample yes", "/set top_k 3", "/set", "/set do_sample no", "/set top_k none"),
        *("hello there", f"/save {saved}", "/set group true", "and then?"),
        *("/set group no", "/set stop <", "/help", "/quit", "never said"),
    ]
    printed = talk(speaker / "heads", script, limit=5)
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


def test_a_reset_leaves_the_counts_of_the_last_answer(speaker: Path, talk: Talk) -> None:
    install(speaker, FAITHFUL)
    told = talk(speaker / "heads", ["hello there", "/stats", "/reset", "/stats"], limit=5).err
    counts = [line for line in told.splitlines() if line.startswith("prompt: ")]
    assert counts[0] == counts[1] and not counts[0].startswith("prompt: 0")


def test_a_setting_without_a_value_is_shown_and_kept(speaker: Path, talk: Talk) -> None:
    script = ["/set top_k 3", "/set stop", "/set top-k", "/set"]
    told = talk(speaker / "heads", script, "--stop", "a b").err
    assert "error" not in told and told.count("\ntop_k 3\n") == 2
    assert told.count("\nstop ['a b']\n") == 2


def test_a_template_is_told_what_the_flag_says(speaker: Path, talk: Talk, refused: Refused) -> None:
    expected = plain_answers(speaker, install(speaker, FAITHFUL + "<x>"), LINES, do_sample=False)
    install(speaker, FAITHFUL + "{{ tail }}")
    printed = talk(speaker / "heads", LINES, "--chat_template_kwargs", '{"tail": "<x>"}')
    assert printed.out == "".join(answer + "\n" for answer in expected)
    said = refused(main, [str(speaker / "heads"), "--chat_template_kwargs", "tail"])
    assert "chat_template_kwargs must be a JSON object, got 'tail'" in said


def test_a_mark_of_the_byte_order_is_not_said(speaker: Path, talk: Talk) -> None:
    """Of a file that was written on Windows, before a command too."""
    install(speaker, FAITHFUL)
    said = talk(speaker / "heads", LINES[:2])
    assert talk(speaker / "heads", ["\ufeff" + LINES[0], LINES[1]]).out == said.out
    assert "temperature None" in talk(speaker / "heads", ["\ufeff/set temperature"]).err


def test_mistakes_in_a_conversation_do_not_end_it(
    speaker: Path, tmp_path: Path, talk: Talk
) -> None:
    install(speaker, FAITHFUL)
    mistakes = {
        "/frobnicate": "unknown command /frobnicate; /help lists them",
        "/set temprature 1": "unknown setting 'temprature'; did you mean 'temperature'?",
        "/set temperature hot": "temperature must be of type float, got 'hot'",
        "/set top_p 7": "top_p must be above 0 and at most 1",
        "/set acceptance loose": "acceptance must be one of",
        "/set stop \udce9": "not UTF-8 text",
        "/set tau 1": "lossless acceptance has no setting",
        "/set tree 0": "at least 1 drafted node",
        "/set drafter suffix": "heads draft in this chat",
        "/set checkpoint x": "unknown setting 'checkpoint'",
        "/save": "/save needs the name of a file",
        f"/save {tmp_path}/no/where.json": "no/where.json' cannot be written (No such file",
        f"/save {tmp_path}": f"'{tmp_path}' cannot be written (Is a directory)",
        "x" * 600: "/reset starts a new one",
    }
    printed = talk(speaker / "heads", ["hello there", *mistakes, "and then?"])
    answers = plain_answers(speaker, FAITHFUL, LINES[:2], do_sample=False)
    assert printed.out == "".join(answer + "\n" for answer in answers)
    told = printed.err.splitlines()
    assert told.pop(0).startswith("target: ")  # what is computed with
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
    speaker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talk: Talk
) -> None:
    install(speaker, FAITHFUL)
    saved = tmp_path / "talk.json"
    screen = Interrupting()
    monkeypatch.setattr("sys.stdout", screen)
    script = ["hello there", "/stats", "and then?", f"/save {saved}"]
    assert "(stopped)" in talk(speaker / "heads", script).err
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


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only the user may speak') }}", "only the user may speak"),
        ("{{ messages[0].content + 5 }}", "can only concatenate str"),
    ],
)
def test_a_template_that_refuses(template: str, said: str, speaker: Path, talk: Talk) -> None:
    install(speaker, template)
    told = talk(speaker / "heads", ["hello"], "--system", "be brief").err
    assert f"error: the chat template refuses it ({said}" in told


def test_a_system_message_that_is_no_text(speaker: Path, refused: Refused) -> None:
    said = refused(main, [str(speaker / "heads"), "--system", "be \udcff"])
    assert "not UTF-8 text: give it as UTF-8 (from its character 4 on)" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "expected a heads checkpoint"),
        (["{}/heads", "--target", "nowhere"], "expected a causal language model"),
        (["{}/heads", "--temprature", "1"], "did you mean '--temperature'"),
        (["{}/heads", "--prompt", "x"], "unknown argument '--prompt'"),
        (["{}/heads", "--typical-p", "0"], "typical_p must be above 0"),
        (
            ["{}/heads", "--acceptance", "typical", "--tau", "1"],
            "has no setting 'tau': log_ratio acceptance has it",
        ),
        ([], "--checkpoint is missing"),
        (["{}/heads", "--drafter", "auto"], "holds heads, and --drafter drafts without any"),
        (["{}/target", "--drafter", "auto", "--tree", "chain"], "with --drafter there is neither"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, speaker: Path, refused: Refused
) -> None:
    assert message in refused(main, [flag.format(speaker) for flag in flags])


def test_generate_tells_of_a_prompt_that_the_chat_template_has_not_rendered(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(save_speaker(tmp_path, tiny_llama))
    for prompt, told in (("def f(", True), (f"{END}def f(", False)):
        given = [target, "--drafter", "suffix", "--prompt", prompt, "--max-new-tokens", "2"]
        assert generate(given) == 0
        assert ("without its chat template" in capsys.readouterr().err) is told
