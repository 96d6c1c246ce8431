"""Words that no target could be decoded with are refused before one is loaded."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_heads import inference
from medusa_heads.cli import train_draft, train_heads
from medusa_heads.cli.main import main
from medusa_heads.cli.verbs import prepare_hidden
from medusa_heads.machine import choice
from tests.conftest import Refused

HEADS, DRAFT = ["{}/heads"], ["{}/target", "--draft_model", "{}/target"]
ALONE = ["{}/target", "--drafter"]
DRAFTING = [
    ([*HEADS, "--tree", "recycling:64"], "tree must be auto, fastest, none"),
    ([*HEADS, "--tree", "recycling:0"], "tree must be auto, fastest, none"),
    ([*HEADS, "--tree", "none+suffix"], "leaves the heads nothing to draft"),
    ([*HEADS, "--tree", "nowhere.json"], "expected a JSON list of rank paths at 'nowhere.json'"),
    ([*HEADS, "--tree", "16:3"], "got '16:3'"),
    ([*HEADS, "--tree", "chain", "--corpus", "{}"], "continued by the trees auto, N+suffix"),
    ([*HEADS, "--tree", "bla"], "tree must be auto, fastest, none"),
    ([*DRAFT, "--tree", "bla"], "a draft model's tree must be auto"),
    ([*ALONE, "auto", "--tree", "bla"], "a tree is of heads or a draft model"),
    ([*ALONE, "bla"], "drafter must be one of"),
    ([*HEADS, "--tau", "1"], "lossless acceptance has no setting"),
    ([*DRAFT, "--epsilon", "0.1"], "lossless acceptance has no setting"),
    ([*ALONE, "auto", "--epsilon", "0.1"], "lossless acceptance has no setting"),
    (
        [*HEADS, "--tree", "8+suffix", "--acceptance", "threshold"],
        "leave '+suffix' out",
    ),
    ([*DRAFT, "--tree", "static:4"], "a draft model's tree must be auto"),
    ([*DRAFT, "--tree", "chain:0"], "a draft has at least 1 token, got 'chain:0'"),
    ([*DRAFT, "--tree", "chain:1025"], "a tree has at most 1024 drafted nodes, got 'chain:1025'"),
    ([*DRAFT, "--tree", "sampled:9x9x9x9"], "a tree has at most 1024 drafted nodes"),
    ([*HEADS, "--tree", "chain:1025"], "a tree has at most 1024 drafted nodes, got 'chain:1025'"),
    ([*HEADS, "--tree", "cartesian:9,9,9,9"], "a tree has at most 1024 drafted nodes"),
    ([*HEADS, "--tree", "suffix:1025"], "a tree has at most 1024 drafted nodes"),
    ([*ALONE, "recycling:64"], "recycling:N drafts 1 to 63 tokens, got 64"),
    ([*ALONE, "recycling:0"], "recycling:N drafts 1 to 63 tokens, got 0"),
    ([*ALONE, "early_exit:0+suffix"], "keeps at least 1 of the target's layers"),
]
TEXT = [
    ([*HEADS, "--max_new_tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    ([*HEADS, "--max_new_tokens", "-3"], "max_new_tokens must be at least 1, got -3"),
    ([*HEADS, "--temperature", "0"], "temperature must be above 0, got 0.0: leave sampling off"),
    ([*DRAFT, "--temperature", "-1"], "temperature must be above 0, got -1.0: leave sampling off"),
    ([*HEADS, "--top_k", "-1"], "top_k must be at least 0, got -1"),
    ([*HEADS, "--min_p", "2"], "min_p must be at least 0 and at most 1, got 2.0"),
    ([*ALONE, "auto", "--repetition_penalty", "0"], "repetition_penalty must be above 0, got 0.0"),
    ([*HEADS, "--top_p", "2"], "top_p must be above 0"),
    ([*HEADS, "--compile_late", "--deterministic"], "goes by clocks"),
    ([*HEADS, "--compile_kernels", "--deterministic"], "leave --compile_kernels out"),
    ([*HEADS, "--compile", "--compile_steps"], "exclude each other"),
    ([*HEADS, "--compile_kernels", "--compile_late"], "exclude each other"),
    ([*DRAFT, "--compile_late"], "say compile=True or leave it out"),
]
METHODS = [
    (["heads:recycling:64"], "tree must be auto, fastest, none"),
    (["heads:8+corpus"], "a corpus is continued by auto"),
    (["draft-model:bushy"], "a draft model's tree must be auto"),
    (["recycling:64"], "recycling:N drafts 1 to 63 tokens, got 64"),
    (["recycling:0+compile"], "recycling:N drafts 1 to 63 tokens, got 0"),
    (["heads", "--tree", "recycling:0"], "tree must be auto, fastest, none"),
]
CASES = [
    *(("generate", [*flags, "--prompt", "x"], said) for flags, said in DRAFTING + TEXT),
    *(("chat", flags, said) for flags, said in DRAFTING + TEXT),
    *(("serve", [*flags, "--port", "0"], said) for flags, said in DRAFTING),
    *(("benchmark", [*HEADS, "--methods", *names], said) for names, said in METHODS),
]


@pytest.fixture
def nothing_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    for of, name in ((AutoModelForCausalLM, "from_pretrained"), (choice, "choose")):
        monkeypatch.setattr(of, name, lambda *_, **__: pytest.fail("!"))


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("verb", "flags", "said"), CASES, ids=[" ".join((verb, *flags)) for verb, flags, _ in CASES]
)
def test_words_are_refused_before_a_target_is_loaded(
    verb: str, flags: list[str], said: str, checkpoint: Path, refused: Refused
) -> None:
    assert said in refused(main, [verb, *(flag.format(checkpoint) for flag in flags)])


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_place_to_serve_at_is_looked_for_before_a_target_is_loaded(
    checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["serve", str(checkpoint / "heads")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "give another --port" in refused(main, [*command, "--port", port])
    for name in list(sys.modules):
        if name.startswith("medusa_heads.inference.endpoint"):
            monkeypatch.delitem(sys.modules, name)
    # Importing it anew lays it there, for all that looks it up by its name.
    monkeypatch.setattr(inference, "endpoint", None, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "serving needs uvicorn: pip install starlette uvicorn" in refused(main, command)


@pytest.mark.parametrize("train", [train_heads.main, train_draft.main], ids=["heads", "draft"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output_dir", "taken"], "expected a folder at 'taken', found a file"),
        (["--output_dir", "model"], "'model' holds a model that no run of medusa-heads wrote"),
        (["--resume_from_checkpoint", "nix"], "expected a whole checkpoint in the folder 'nix'"),
        (["--dry_run", "--resume_from_checkpoint", "last"], "nothing to resume: 'runs/"),
        (
            ["--output_dir", "earlier", "--resume_from_checkpoint", "last"],
            "'earlier' has no whole checkpoint-* folder; resume_from_checkpoint 'auto' begins anew",
        ),
        (["--dry_run", "--output_dir", "earlier"], "'earlier' holds checkpoints of an earlier run"),
        (
            ["--output_dir", "earlier"],
            "(checkpoint-8), none of them whole: resume_from_checkpoint 'auto' begins anew",
        ),
        (["--training_args", "{bad"], "training_args must be a JSON object, got '{bad'"),
        (["--training_args", '{"max_grad_norm": "x"}'], "max_grad_norm must be of type float"),
        (["--training_args", '{"max_grad_nrom": 1}'], "did you mean 'max_grad_norm'?"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_its_text_is_read(
    train: Callable[[list[str]], int],
    flags: list[str],
    said: str,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which would be refused as well, and so would the target."""
    monkeypatch.chdir(tmp_path)
    for name in ("taken", "empty.jsonl"):
        Path(name).touch()
    Path("earlier", "checkpoint-8").mkdir(parents=True)
    Path("model").mkdir()
    Path("model", "config.json").write_text('{"model_type": "llama"}')
    given = ["--model_name_or_path", "./nowhere", "--dataset", "empty.jsonl"]
    assert said in refused(train, [*given, *flags])


@pytest.mark.parametrize("command", ["train-heads", "prepare-hidden"])
def test_a_stream_with_a_cache_is_refused_before_its_text_is_read(
    command: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run planned it."""
    monkeypatch.chdir(tmp_path)
    given = ["--model_name_or_path", "./nowhere", "--dataset", "nowhere.jsonl", "--streaming"]
    given += ["--max_steps", "2", "--hidden_cache", "auto", "--dry_run"]
    train = train_heads.main if command == "train-heads" else prepare_hidden.main
    assert "leave streaming or hidden_cache off" in refused(train, given)


@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_norm_output_of_heads_without_such_a_layer_is_refused_at_once(
    kind: str, refused: Refused
) -> None:
    flags = ["--model_name_or_path", "nowhere", "--dataset", "stdlib", "--norm_output"]
    assert f"{kind} heads have none" in refused(train_heads.main, [*flags, "--kind", kind])
