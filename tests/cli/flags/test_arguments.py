"""Flags, the YAML file underneath them, and errors in one sentence."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import SafetensorError

from medusa_heads.cli.flags.arguments import parse_arguments, run_command
from medusa_heads.cli.flags.config_file import read_config
from medusa_heads.cli.verbs.generate import GenerateArguments
from medusa_heads.errors import MedusaWarning
from medusa_heads.settings import coerce


@dataclass
class Model:
    """A required field and a choice."""

    name: str = field(metadata={"help": "required"})
    kind: Literal["small", "large"] = "small"


@dataclass
class Run:
    """One field of every other type."""

    learning_rate: float | None = None
    num_steps: int = 5
    loud: bool = False
    tags: list[str] = field(default_factory=list)
    extra: dict | str | None = None


def parse(*argv: str) -> tuple[Any, ...]:
    return parse_arguments((Model, Run), argv, prog="tool", description="A tool.")


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_flags_alone() -> None:
    model, run = parse("--name", "a", "--num-steps", "7", "--learning_rate", "1e-4", "--loud")
    assert (model.name, model.kind, run.num_steps, run.learning_rate) == ("a", "small", 7, 1e-4)
    assert run.loud and run.tags == []


def test_a_flag_beats_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        "name: b\nkind: large\nlearning_rate: 1e-4\nnum-steps: 9\nloud: true\ntags: [x, y]\n"
        "extra: {deep: 1}\n",
    )
    model, run = parse("--config", config, "--num_steps", "3")
    assert (model.name, model.kind) == ("b", "large")
    assert run == Run(1e-4, 3, True, ["x", "y"], '{"deep": 1}')
    assert parse("--config", config, "--tags", "c")[1].tags == ["c"]


def test_a_list_is_given_once() -> None:
    with pytest.raises(ValueError, match="--tags: given twice: write all its values behind one"):
        parse("--name", "n", "--tags", "a", "b", "--loud", "--tags", "c")


def test_values_of_a_flag_that_may_be_given_again_are_joined(tmp_path: Path) -> None:
    argv = ["--stop", "a", "--stop", "b", "--config", write(tmp_path, "checkpoint: c\nstop: [x]")]
    (told,) = parse_arguments((GenerateArguments,), argv, prog="tool", description="")
    assert told.stop == ["a", "b"], "together they beat those of the file"


def test_a_preset_stands_under_flags_and_file(tmp_path: Path) -> None:
    presets = {"kind": {"large": {"num_steps": 7, "learning_rate": 1e-3}}}

    def run_of(*argv: str) -> Run:
        types = (Model, Run)
        read = parse_arguments(types, argv, prog="tool", description="", presets=presets)
        assert isinstance(read[1], Run)
        return read[1]

    assert run_of("--name", "a") == run_of("--name", "a", "--kind", "small") == Run()
    assert run_of("--name", "a", "--kind", "large") == Run(1e-3, 7)
    assert run_of("--name", "a", "--kind=large", "--num_steps", "2") == Run(1e-3, 2)
    config = write(tmp_path, "name: b\nkind: large\nnum_steps: 9\n")
    assert run_of("--config", config) == Run(1e-3, 9)
    assert run_of("--config", config, "--kind", "small") == Run(None, 9)
    with pytest.raises(ValueError, match="invalid choice: 'huge'"):
        run_of("--name", "a", "--kind", "huge")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, ""), "--name", "a") == (Model("a"), Run())


def test_the_first_arguments_need_no_flags() -> None:
    def given(*argv: str) -> tuple[Any, ...]:
        names = ("name", "num_steps")
        return parse_arguments((Model, Run), argv, prog="tool", description="", positional=names)

    assert given("a", "7") == (Model("a"), Run(num_steps=7))
    assert given("a", "--loud") == (Model("a"), Run(loud=True))
    assert given("--name", "a", "--num_steps", "7") == given("a", "7")
    with pytest.raises(ValueError, match="unknown argument 'b'; text of several words needs quo"):
        given("a", "7", "b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--name is missing"),
        (
            ("--name", "a", "--num_stepz", "3"),
            "unknown argument '--num_stepz'; did you mean '--num",
        ),
        (("--num_stepz", "3"), "unknown argument '--num_stepz'"),
        (("--name", "a", "--num_steps", "x"), "invalid int value: 'x'"),
        (("--name", "a", "--kind", "medium"), "invalid choice: 'medium'"),
        (("--name", "a", "--config", "nowhere.yaml"), "expected a YAML file at 'nowhere.yaml'"),
        (("--name", "a", "--config"), "expected one argument"),
    ],
)
def test_flags_that_do_not_fit(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_stpes: 3", "unknown key 'num_stpes'; did you mean 'num_steps'"),
        ("zzz: 3", "unknown key 'zzz'; known: extra, kind,"),
        ("num_steps: many", "num_steps must be of type int, got 'many'"),
        ("num_steps: true", "num_steps must be of type int, got True"),
        ("learning_rate: fast", "learning_rate must be of type float, got 'fast'"),
        ("kind: medium", "kind must be one of"),
        ("tags: 3", "tags must be a list, got 3"),
        ("- a\n- b", "must hold 'key: value' lines, got a YAML list"),
        ("a: [", "not valid YAML"),
        ("num_steps: 3\nnum_steps: 4", r"the key 'num_steps' is given twice\s+in .* line 2"),
        ("num_steps: 3\nnum-steps: 4", "the key 'num-steps' is given twice"),
        ("extra:\n  a: 1\n  a: 2", "the key 'a' is given twice"),
        ("extra: {a: 2001-01-01}", "extra must hold plain values"),
        ("learning_rate: 1" + "0" * 400, "learning_rate must be of type float"),
        ("zzz: {2001-01-01: 1}", "unknown key 'zzz'"),
        ("num_steps: !!bool maybe", "run.yaml is not valid YAML .*tag"),
    ],
)
def test_files_that_do_not_fit(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, text), (Model, Run))


def test_yaml_reads_a_bare_exponent_as_a_string_and_it_becomes_a_float() -> None:
    assert coerce("1e-4", float, "x") == 1e-4
    assert coerce(5, float | None, "x") == 5.0 and coerce(None, float | None, "x") is None


@pytest.mark.parametrize("error", [ValueError("bad\n  thing"), FileNotFoundError("bad thing")])
def test_a_users_mistake_is_one_sentence(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    assert run_command(fail) == 2
    assert capsys.readouterr().err == "medusa-heads: error: bad thing\n"
    monkeypatch.setenv("MEDUSA_HEADS_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run_command(fail)


@pytest.mark.parametrize(
    ("error", "of"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "'/x/y' cannot be read or written"),
        (FileNotFoundError(2, "No such file", "/x/y"), "'/x/y' cannot be read or written"),
        (
            OSError(18, "Invalid cross-device link", "/x/y", None, "/z"),
            "'/x/y' cannot be copied or moved to '/z'",
        ),
    ],
)
def test_what_the_system_refuses_is_a_sentence(
    error: OSError, of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_command(fail) == 2
    told = f"{of} ({error.strerror})"
    assert capsys.readouterr().err == f"medusa-heads: error: {told}\n"


def test_a_sentence_shows_no_password_and_steers_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ValueError("a stranger's \x1b[2J\x07\ud800 at https://me:secret@host/x, for \u4f60")

    assert run_command(fail) == 2
    said = capsys.readouterr().err
    assert "a stranger's \\x1b[2J\\x07\\ud800 at https://***@host/x, for \u4f60\n" in said


def test_a_sentence_that_quotes_too_much_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError(f"num_steps must be a number, got {'x' * 100_000!r}: give one")

    assert run_command(fail) == 2
    said = capsys.readouterr().err
    assert said.startswith("medusa-heads: error: num_steps must be") and len(said) < 1300
    assert said.endswith("': give one\n") and " [..] " in said


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried")]
)
def test_full_memory_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert run_command(fail) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = " ".join(str(error).split()) or "MemoryError"
    assert line == (
        f"medusa-heads: error: the memory is full: take smaller batches or shorter texts ({said})"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no disk that is always full")
def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def save() -> None:
        Path("/dev/full").write_bytes(b"x")

    def save_tensors() -> None:
        # In the words of safetensors, which writes to no device.
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    def save_optimiser() -> None:
        torch.save({"a": torch.zeros(100_000)}, "/dev/full")

    for work in (save, save_tensors, save_optimiser):
        assert run_command(work) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("medusa-heads: error: a file could not be written, is the disk full")


def test_own_warnings_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        warnings.warn("one row was left out", MedusaWarning, stacklevel=2)
        warnings.warn("of others", UserWarning, stacklevel=2)

    with pytest.warns(UserWarning, match="of others") as told:
        assert run_command(work, prog="tool") == 0
    assert len(told) == 1
    assert capsys.readouterr().err == "tool: warning: one row was left out\n"


def test_what_a_library_says_of_a_package_that_nobody_needs_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """bitsandbytes, which peft imports, warns of it on processors with bf16 instructions."""
    ops = pytest.importorskip("bitsandbytes.backends.cpu.ops")
    sentence = "Failed to load CPU gemm_4bit_forward from kernels-community: %s."
    assert sentence in Path(ops.__file__).read_text(), "said otherwise by now"
    caplog.clear()  # of what was imported just now

    def work() -> None:
        for told in (sentence, "the matrix is damaged: %s"):
            ops.logger.warning(told, "why")

    assert run_command(work) == 0
    assert [record.getMessage() for record in caplog.records] == ["the matrix is damaged: why"]
    work()
    assert len(caplog.records) == 3, "left out of others' programs as well"


def test_help_fills_sentences_and_leaves_commands_as_they_are_pasted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "One thought\nover two lines.\n\nmedusa-heads tool --name a\ntrain-heads --name b\n"
    with pytest.raises(SystemExit):
        parse_arguments((Model,), ["--help"], prog="tool", description=told)
    shown = capsys.readouterr().out
    assert "\nOne thought over two lines.\n" in shown
    assert "\n  medusa-heads tool --name a\n  train-heads --name b\n" in shown


def test_help_leaves_the_commands_of_a_conversation_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "One thought.\n\n/stats    counts\n/quit     leave\n"
    with pytest.raises(SystemExit):
        parse_arguments((Model,), ["--help"], prog="tool", description=told)
    assert "\n  /stats    counts\n  /quit     leave\n" in capsys.readouterr().out
