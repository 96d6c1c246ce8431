"""`medusa-heads convert` and `export`: what they print, mistakes, and the documented commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.checkpoint.stored_heads import read_stored
from medusa_heads.cli.main import main
from medusa_heads.interop import ReadFormat, WrittenFormat
from tests.conftest import Refused, TinyLlama
from tests.interop import layouts
from tests.interop.layers import eagle3, eagle3_config, written
from tests.interop.layouts import native_tensors

DOCS = (Path(__file__).parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(5))


def test_there_and_back(
    old: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, served = str(tmp_path / "heads"), str(tmp_path / "served")
    assert main(["convert", str(old), heads, "--target", str(target)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "fasterdecoding: 5 medusa heads of 1 block and a vocabulary matrix each, 199 tokens wide",
        "note: config.json says medusa_num_heads: 2, the weights hold 5: taken from the weights",
        f"written to {heads}",
    ]
    assert main(["export", heads, served, "--to", "vllm"]) == 0
    assert capsys.readouterr().out == f"written for vllm to {served}\n"
    assert main(["convert", served, str(tmp_path / "again"), "--from", "vllm"]) == 0
    again = read_stored(tmp_path / "again").tensors
    layouts.assert_same_bits(again, native_tensors(5))


def test_the_steps_of_a_layer_have_one_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = written(tmp_path / "old", eagle3(2), eagle3_config())
    assert main(["convert", str(old), str(tmp_path / "heads")]) == 0
    shown = capsys.readouterr().out
    assert "eagle3 heads of 1 block and a vocabulary matrix of their own, " in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert", "--source is missing"),
        ("convert {}", "--out is missing"),
        ("convert {}/none {}/out", "found none"),
        ("convert {}/old {}/old", "exists and is not empty"),
        ("convert {}/old {}/out --from gguf", "invalid choice: 'gguf'"),
        ("convert {}/old {}/out --form tgi", "did you mean '--from'"),
        ("convert {}/old {}/out --extract_target", "a whole model"),
        ("convert {}/old {}/out --target {}/none", "found none"),
        ("convert {}/old {}/out --corpus {}/none.txt", "expected a corpus at"),
        ("export {}/old {}/out --to vllm", "expected a heads checkpoint"),
        ("export {}/old {}/out", "--to is missing"),
        ("export {}/old {}/out --to sglang", "invalid choice: 'sglang'"),
    ],
)
def test_mistakes_are_one_sentence(command: str, message: str, old: Path, refused: Refused) -> None:
    assert message in refused(main, [word.format(old.parent) for word in command.split()])


def test_measured_on_the_way(
    old: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target here has no tokenizer of its own: pieces are the bytes of the test's text."""
    pieces = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:199])}
    bytes_ = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    speaking = shutil.copytree(target, tmp_path / "speaking")
    PreTrainedTokenizerFast(tokenizer_object=bytes_).save_pretrained(speaking)
    text = tmp_path / "text.txt"
    text.write_text("for x in path: print(x)\n" * 40)
    heads = str(tmp_path / "heads")
    flags = ["--target", str(speaking), "--corpus", str(text)]
    assert main(["convert", str(old), heads, *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.index(f"written to {heads}") < shown.index("Measuring 5 heads")
    stored = read_stored(heads)
    assert stored.statistics is not None and stored.statistics["num_heads"] == 5
    assert set(stored.provenance) >= {"converted_from", "calibrated"}


def test_heads_that_cannot_be_measured_are_converted_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nameless = {"base_model_name_or_path": None}
    old = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(5), **nameless)
    text = tmp_path / "text.txt"
    text.write_text("words\n")
    heads = str(tmp_path / "heads")
    assert main(["convert", str(old), heads, "--corpus", str(text)]) == 2
    printed = capsys.readouterr()
    assert "does not name its target" in printed.err and "medusa-heads calibrate" in printed.err
    assert printed.err.count("\n") == 1
    assert read_stored(heads).statistics is None


def test_a_password_in_the_name_of_a_target_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"base_model_name_or_path": "https://me:hunter2@hub.example/a/b"}
    old = layouts.fasterdecoding_pt(tmp_path / "old", native_tensors(2), **named)
    assert main(["convert", str(old), str(tmp_path / "heads")]) == 0
    assert "the target is 'https://***@hub.example/a/b'" in capsys.readouterr().out


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, flags=re.DOTALL)


def test_the_documented_commands_run(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With tiny models in the hub's cache under the names that the documentation uses."""
    cache = tmp_path / "hub"

    def repository(name: str) -> Path:
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        return folder / "snapshots" / COMMIT

    layouts.fasterdecoding_pt(
        repository("FasterDecoding/medusa-vicuna-7b-v1.3"), native_tensors(5, dtype=torch.float16)
    )
    shutil.copytree(target, repository("lmsys/vicuna-7b-v1.3"))
    layouts.whole_model(
        repository("FasterDecoding/medusa-1.0-zephyr-7b-beta"),
        target,
        native_tensors(5),
        "medusa_head.",
        {"medusa_num_heads": 5, "medusa_num_layers": 1},
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    assert {command[1] for command in commands} == {"convert", "export"}
    for program, *rest in commands:
        assert program == "medusa-heads"
        assert main(rest) == 0, capsys.readouterr().err
    named = json.loads((tmp_path / "runs/vicuna/medusa_heads.json").read_text())["target"]
    assert named["name_or_path"] == "lmsys/vicuna-7b-v1.3" and named["revision"] == COMMIT
    assert (tmp_path / "runs/zephyr/target/config.json").is_file()

    torch.save(native_tensors(5), tmp_path / "medusa_lm_head.pt")
    (python,) = blocks("python")
    exec(python, {})
    assert "num_heads=5" in capsys.readouterr().out


def test_every_format_is_documented() -> None:
    (table,) = re.findall(r"\n\| format.*?\n\n", DOCS, flags=re.DOTALL)
    for name in {*get_args(ReadFormat), *get_args(WrittenFormat)}:
        assert f"`{name}`" in table
