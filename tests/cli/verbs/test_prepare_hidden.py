"""The verb prepare-hidden: what it writes is what train-heads reads, of the same flags."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from medusa_heads.cli import train_heads
from medusa_heads.cli.verbs import prepare_hidden
from medusa_heads.training.hidden import prepare
from tests.conftest import Refused
from tests.killed import dies
from tests.training.cache_runs import same


@pytest.fixture
def flags(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Of a run of 5 steps on 20 rows of text, on a target that speaks characters."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"{chr(97 + row)}bcdefgh ijkl"[: 6 + row % 7] * 2 for row in range(26)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"use_cpu": True, "disable_tqdm": True}
    return [
        *("--model_name_or_path", str(checkpoint / "target"), "--dataset", str(corpus)),
        *("--num_heads", "2", "--eval_rows", "6", "--max_length", "32", "--bf16", "false"),
        *("--num_train_epochs", "1", "--per_device_train_batch_size", "4"),
        *("--prepared_dir", str(tmp_path / "prepared"), "--training_args", json.dumps(settings)),
    ]


def test_a_file_in_place_of_the_folder_is_seen_before_the_target_is_loaded(
    flags: list[str], tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("!"))
    states = ["--hidden_cache_dir", str(tmp_path / "corpus.jsonl")]
    sentence = "hidden_cache_dir must be a folder, and "
    assert sentence in refused(prepare_hidden.main, [*flags, *states])
    trained = [*states, "--hidden_cache", "read", "--output_dir", str(tmp_path / "out")]
    assert sentence in refused(train_heads.main, [*flags, *trained])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_heads_learn_the_same_from_what_was_written(
    dtype: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags, "--dtype", dtype]
    states = ["--hidden_cache_dir", str(tmp_path / "states")]
    assert prepare_hidden.main([*flags, *states, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "for 1 pass no cache is cheaper" in shown and not (tmp_path / "states").exists()
    assert prepare_hidden.main([*flags, *states]) == 0
    assert "kB to be written" in capsys.readouterr().out
    assert prepare_hidden.main([*flags, *states]) == 0
    assert "0 bytes to be written" in capsys.readouterr().out
    runs = {"off": [], "read": ["--hidden_cache", "read", *states]}
    for name, more in runs.items():
        assert train_heads.main([*flags, *more, "--output_dir", str(tmp_path / name)]) == 0
    online, read = (load_file(tmp_path / name / "medusa_lm_head.safetensors") for name in runs)
    assert same(online, read)
    assert f"read from {tmp_path / 'states'}" in capsys.readouterr().out


def test_a_dry_run_of_training_says_whether_a_cache_pays(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--output_dir", str(tmp_path / "run"), "--num_train_epochs", "1000", "--dry_run"]
    assert train_heads.main([*flags, *more]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Hidden states: the target computes a pass in" in shown
    assert "for 1,000 passes" in shown


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--mtp"], "modules (--mtp) read no hidden states from disk"),
        (["--joint"], "joint training changes the target's hidden states"),
        (["--streaming", "--max_steps", "2"], "which a stream does not"),
        (["--hidden_cache_dtype", "int8"], "invalid choice: 'int8'"),
        (["--features", "9"], "features asks for layer 9"),
        (["--engine_args", '{"max_num_seqs": 4}'], "engine_args is read by the backend vllm alone"),
        (["--backend", "vllm"], "the backend vllm needs vLLM, and it is not installed"),
        (["--backend", "vllm", "--engine_args", '{"dtype": "half"}'], "cannot set dtype"),
        (["--backend", "vllm", "--self_distill"], "medusa-heads regenerate --backend vllm"),
        (["--backend", "vllm", "--tensor_parallel"], "leave tensor_parallel out, and say so in"),
        (
            ["--backend", "vllm", "--attn_implementation", "flash_attention_2"],
            "where flash_attention_2 does not run",
        ),
        (["--backend", "vllm", "--load_in_4bit"], "leave load_in_4bit out, and say so in"),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(
    more: list[str],
    sentence: str,
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prepare_hidden.main([*flags, "--output_dir", str(tmp_path / "run"), *more]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_a_dry_run_writes_no_text(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--prompt_length", "4", "--continuation_length", "8", "--num_prompts", "8"]
    more = [*lengths, "--num_eval_prompts", "4", "--output_dir", str(tmp_path / "run")]
    assert prepare_hidden.main([*flags, *more, "--self_distill", "--dry_run"]) == 0
    assert "is cheaper" in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_a_disk_that_cannot_be_measured_ends_no_dry_run_of_training(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--output_dir", "/proc/nowhere", "--dry_run"]  # where nothing can be written
    assert train_heads.main([*flags, *more]) == 0
    assert "The disk of hidden states was not measured:" in capsys.readouterr().out


def test_other_text_is_not_read_from_what_was_written(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = ["--hidden_cache_dir", str(tmp_path / "states")]
    assert prepare_hidden.main([*flags, *states]) == 0
    more = ["--output_dir", str(tmp_path / "run"), "--hidden_cache", "read", *states]
    assert train_heads.main([*flags, *more, "--max_length", "8"]) == 2
    error = capsys.readouterr().err
    assert "(the nearest differs in rows and rows_sha256): write them" in error
    assert train_heads.main([*flags, *more, "--hidden_cache_dtype", "float8_e4m3fn"]) == 2
    assert "(the nearest differs in stored_in): write them" in capsys.readouterr().err


def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = [*flags, "--hidden_cache_dir", str(tmp_path / "states"), "--dtype", "float32"]
    write = prepare.write_shard

    def refused(*shard: Any) -> None:
        # From here on the system refuses files that are longer, as a shard is. What is printed goes
        # to files as well, and is shorter.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        write(*shard)

    def until_full() -> None:
        monkeypatch.setattr(prepare, "write_shard", refused)
        (tmp_path / "code").write_text(str(prepare_hidden.main(flags)))

    assert not dies(until_full)
    assert (tmp_path / "code").read_text() == "2"
    said = capfd.readouterr().err
    assert "medusa-heads: error: [Errno 27] File too large" in said and "Traceback" not in said
    assert not list((tmp_path / "states").rglob("*.part"))
    assert prepare_hidden.main(flags) == 0
