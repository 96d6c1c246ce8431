"""`medusa-heads generate`: streams exactly what generate() returns; mistakes are one sentence."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medusa_heads import TargetModel
from medusa_heads.checkpoint.draft_checkpoint import save_draft
from medusa_heads.cli.streaming import StepStreamer
from medusa_heads.cli.verbs.generate import main
from medusa_heads.inference.models.training_free import DRAFTERS
from tests.conftest import Refused, TinyLlama
from tests.pairs import with_slow


def expected(checkpoint: Path, **options: Any) -> str:
    model: Any = TargetModel.from_pretrained(str(checkpoint / "target")).model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint / "target")
    inputs = tokenizer("def f(", return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(3)
    out = model.generate(**inputs, max_new_tokens=30, **options)
    text = tokenizer.decode(out[0])
    assert isinstance(text, str)
    return text


DRAWN: dict[str, Any] = {"do_sample": True}


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"do_sample": False}),
        (["--temperature", "0.7", "--top-k", "5"], DRAWN | {"temperature": 0.7, "top_k": 5}),
        (["--min-p", "0.1", "--typical-p", "0.8"], DRAWN | {"min_p": 0.1, "typical_p": 0.8}),
        (["--no-repeat-ngram-size", "2"], {"do_sample": False, "no_repeat_ngram_size": 2}),
        (["--deterministic"], {"do_sample": False}),
    ],
)
def test_streams_the_targets_text(
    checkpoint: Path, flags: list[str], options: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(checkpoint / "heads"), "--prompt", "def f(", "--max-new-tokens", "30"]
    assert main([*base, "--seed", "3", "--rng", "transformers", *flags, "--stats"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == expected(checkpoint, **options).rstrip("\n")
    assert "tokens per step" in printed.err


@pytest.mark.parametrize("drafter", with_slow(["auto"], [d for d in DRAFTERS if d != "auto"]))
def test_a_target_drafts_for_itself(
    checkpoint: Path, drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(checkpoint / "target"), "--prompt", "def f(", "--max-new-tokens", "30"]
    assert main([*base, "--drafter", drafter, "--stats"]) == 0
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == expected(checkpoint, do_sample=False).rstrip("\n")
    assert "tokens per step" in printed.err


def test_the_fastest_of_several_draft_models_drafts(
    speaker: Path, tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetModel.from_pretrained(str(speaker / "target"))
    small = tiny_llama(vocab_size=target.vocab_size, num_layers=1)
    save_draft(tmp_path / "small", small, target)
    save_draft(tmp_path / "large", target.model, target)
    drafts = [str(tmp_path / "small"), str(tmp_path / "large")]
    rest = ["--prompt", "def f(", "--max-new-tokens", "30", "--tree", "chain:3", "--stats"]
    texts = set()
    for flags in (["--draft-model", *drafts], *(["--draft-model", draft] for draft in drafts)):
        assert main([str(speaker / "target"), *flags, *rest]) == 0
        printed = capsys.readouterr()
        texts.add(printed.out)
        told = re.findall(rf"steps drafted: {drafts[0]} (\d+), {drafts[1]} (\d+)", printed.err)
        # On a busy machine one of them may be too dear to be tried in so few steps.
        assert any(int(steps) for steps in told[0]) if len(flags) == 3 else not told
    assert texts == {expected(speaker, do_sample=False).rstrip("\n") + "\n"}


@pytest.mark.parametrize(
    "flags", with_slow([["heads", "--tree", "suffix"]], [["target", "--drafter", "suffix"]])
)
def test_drafts_continue_a_corpus(
    flags: list[str], speaker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(speaker / flags[0]), *flags[1:], "--prompt", "def f(", "--max-new-tokens", "40"]
    assert main([*base, "--stats"]) == 0
    without = capsys.readouterr()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.py").write_text(f"import this\n{without.out}", encoding="utf-8")
    for corpus in ("corpus", "corpus/a.py"):
        assert main([*base, "--corpus", str(tmp_path / corpus), "--stats"]) == 0
        printed = capsys.readouterr()
        assert printed.out == without.out
        steps = [int(re.findall(r"in (\d+) steps", text.err)[0]) for text in (printed, without)]
        assert 2 * steps[0] < steps[1]


def test_the_help_names_every_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    told = help_text[help_text.index("Draft without training") :].split(". ")[0]
    assert all(drafter in told for drafter in DRAFTERS)


def test_prompt_from_standard_input(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def f("))
    assert main([str(checkpoint / "heads"), "--max-new-tokens", "30"]) == 0
    assert capsys.readouterr().out.startswith("def f(")


def test_marks_and_line_ends_of_other_systems_are_no_part_of_the_prompt(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffdef f(\r\n", newline=""))
    assert main([str(checkpoint / "heads"), "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def f(\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused(
    errors: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"def \xff("), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", given)
    assert "the prompt is not UTF-8 text" in refused(main, [str(checkpoint / "heads")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere", "--prompt", "x"], "expected a heads checkpoint"),
        (["{}/heads", "--prompt", ""], "the prompt is empty"),
        (["{}/heads", "--prompt", "caf\udce9"], "not UTF-8 text: give it as UTF-8 (from its char"),
        (["{}/heads", "--prompt", "x", "--target", "nowhere"], "expected a causal language model"),
        (["{}/heads", "--prompt", "x", "--tree", "0"], "tree"),
        (
            ["{}/target", "--prompt", "x", "--draft-model", "{}/target", "--deterministic"],
            "--deterministic is of heads or a --drafter",
        ),
        (
            ["{}/heads", "--prompt", "x", "--max-new-tokens", "9999"],
            "do not fit the target's context",
        ),
        (["{}/heads", "--prompt", "x", "--temprature", "1"], "did you mean '--temperature'"),
        (["--prompt", "x"], "--checkpoint is missing"),
        (["{}/heads", "--prompt", "x", "--tau", "1"], "lossless acceptance has no setting"),
        (["{}/heads", "--prompt", "x", "--acceptance", "typcal"], "invalid choice: 'typcal'"),
        (["{}/heads", "--prompt", "x", "--top-p", "2"], "top_p must be above 0 and at most 1"),
        (["{}/heads", "--prompt", "x", "--temperature", "0"], "leave sampling off"),
        (["{}/heads", "--prompt", "x", "--temperature", "inf"], "temperature must be a finite"),
        (["{}/heads", "--prompt", "x", "--seed", "1" * 40], "seed must be a number of 64 bits"),
        (["{}/heads", "--prompt", "x", "--stop", ""], "a stop string must not be empty"),
        (["{}/heads", "--prompt", "x", "--no-repeat-ngram-size", "-1"], "at least 0, got -1"),
        (
            ["{}/heads", "--prompt", "x", "--max-new-tokens", "0"],
            "max_new_tokens must be at least 1",
        ),
        (["{}/heads", "--prompt", "x", "--device", "abacus"], "expected a device such as cpu"),
        (["{}/heads", "--prompt", "x", "--drafter", "auto"], "holds heads, and --drafter drafts"),
        (["{}/target", "--prompt", "x", "--drafter", "sufix"], "drafter must be one of auto, suff"),
        (["{}/target", "--prompt", "x", "--drafter", "auto", "--tree", "4"], "there is neither"),
        (
            ["{}/target", "--prompt", "x", "--drafter", "auto", "--target", "x"],
            "the first argument is the target: leave out --target",
        ),
        (
            ["{}/target", "--prompt", "x", "--drafter", "auto", "--draft-model", "x"],
            "leave it or --draft_model out",
        ),
        (["nowhere/at/all", "--prompt", "x", "--drafter", "auto"], "expected a causal language"),
        (
            ["{}/target", "--prompt", "x", "--drafter", "auto", "--corpus", "nowhere"],
            "expected a corpus at 'nowhere'",
        ),
        (
            ["{}/heads", "--prompt", "x", "--tree", "chain", "--corpus", "{}/heads"],
            "continued by the trees auto, N+",
        ),
        (
            ["{}/target", "--prompt", "x", "--drafter", "recycling", "--corpus", "x"],
            "continued by the drafters auto, suffix and all +suffix, not 'recycling'",
        ),
        (
            ["{}/target", "--prompt", "x", "--draft-model", "{}/target", "--corpus", "x"],
            "--corpus is of heads or a --drafter",
        ),
        (
            ["{}/target", "--prompt", "x", "--draft-model", "{}/target", "{}/target"],
            "target' is given twice: name it once",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, checkpoint: Path, refused: Refused
) -> None:
    assert message in refused(main, [flag.format(checkpoint) for flag in flags])


def test_ends_behind_a_stop_string(
    speaker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the target's own settings name it."""
    own = shutil.copytree(speaker / "target", tmp_path / "target")
    rest = ["--prompt", "def f(", "--max-new-tokens", "40"]
    assert main([str(speaker / "heads"), *rest]) == 0
    whole = capsys.readouterr().out
    stop, other = whole[20:22], "no such text"
    (own / "generation_config.json").write_text(json.dumps({"stop_strings": [stop]}))
    stopping = [str(speaker / "heads"), "--stop", other, "--stop", stop]
    for how in (stopping, [str(own), "--drafter", "suffix"]):
        assert main([*how, *rest]) == 0
        assert capsys.readouterr().out == whole[: whole.index(stop, 6) + 2] + "\n"


@pytest.mark.parametrize("rule", with_slow(["typical"], ["threshold", "log_ratio"]))
def test_a_lossy_rule_says_so_once(
    rule: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [str(checkpoint / "heads"), "--prompt", "def f(", "--max-new-tokens", "8", "--stats"]
    assert main([*base, "--acceptance", rule]) == 0
    told = capsys.readouterr().err
    assert told.count(f"{rule} acceptance is lossy") == told.count("own\n") == 1
    assert "lossy acceptance\n" in told
    for exact in ([], ["--rng", "transformers"]):
        assert main([*base, *exact]) == 0
        assert "lossy" not in capsys.readouterr().err


def test_groups_are_the_tokens_of_a_step(
    speaker: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one size: how many nodes `auto` takes depends on how long steps took.
    base = [str(speaker / "heads"), "--prompt", "def f(", "--max-new-tokens", "60", "--stats"]
    base += ["--tree", "15"]
    assert main(base) == 0
    plain = capsys.readouterr()
    steps = int(re.findall(r"in (\d+) steps", plain.err)[0])
    assert steps < 60  # else there would be nothing to group
    assert main([*base, "--group"]) == 0
    groups = re.findall(r"\[(.*?)\]", capsys.readouterr().out, flags=re.DOTALL)
    assert len(groups) == steps
    assert "def f(" + "".join(groups) + "\n" == plain.out

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([*base, "--group"]) == 0
    coloured = capsys.readouterr().out
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain.out
    assert coloured.count("\x1b[36m") + coloured.count("\x1b[33m") == steps


def test_no_character_is_torn_between_steps(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint / "target")
    ids = tokenizer("né €!")["input_ids"]
    assert len(ids) == 8
    streamer = StepStreamer(tokenizer, skip_prompt=True)
    streamer.put(torch.tensor([ids[:1]]))
    shown = []
    for token in ids[1:]:
        streamer.put(torch.tensor([token]))
        streamer.end_step()
        shown.append(capsys.readouterr().out)
    streamer.end()
    assert shown == ["", "é", " ", "", "", "€", "!"]
    assert streamer.tokens == ids[1:]


def test_it_says_what_it_computes_with_and_a_flag_beats_it(
    checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    base = [str(checkpoint / "heads"), "--prompt", "def f(", "--max-new-tokens", "4"]
    for flags, reason in (
        ([], "float32 as its weights are stored"),
        (["--dtype", "bfloat16", "--device", "cpu"], "bfloat16 as asked"),
    ):
        assert main([*base, *flags]) == 0
        told = capsys.readouterr().err
        assert told == f"target: cpu, 1 thread, {reason}\n"
    assert "'cuda:99'" in refused(main, [*base, "--device", "cuda:99"])
    # A mistake that comes after the choice is one sentence, and the next command tells its own.
    refused(main, [*base, "--max-new-tokens", "9999"])
    assert main(base) == 0
    assert capsys.readouterr().err.count("target: ") == 1
