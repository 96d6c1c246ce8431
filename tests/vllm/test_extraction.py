"""vLLM computes the hidden states of a corpus: those of the target's own forwards, but for
rounding, and train-heads reads them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import __version__ as vllm_version

from medusa_heads.cli import train_heads
from medusa_heads.training.hidden.layout import Index
from medusa_heads.training.hidden.store import HiddenCache
from tests.vllm.partly_trained import TARGET

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """`medusa-heads prepare-hidden` of 24 texts, many of which begin alike, in another process."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"def f_{n}(x):\n    return x + {n}\n" * (1 + n % 5) for n in range(24)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def prepared(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "medusa_heads.cli.main", "prepare-hidden", *flags, *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    flags = [
        *("--model_name_or_path", str(TARGET), "--dataset", str(corpus), "--num_heads", "2"),
        *("--eval_rows", "4", "--max_length", "64", "--bf16", "false", "--dtype", "float32"),
        *("--num_train_epochs", "1", "--per_device_train_batch_size", "4", "--output_dir"),
        *(str(tmp_path / "run"), "--prepared_dir", str(tmp_path / "prepared")),
        *("--training_args", json.dumps({"use_cpu": True, "disable_tqdm": True})),
    ]
    prepared.flags, prepared.environment = flags, environment  # type: ignore[attr-defined]
    return prepared


def vllm(**engine: object) -> tuple[str, ...]:
    said = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4} | engine
    return "--backend", "vllm", "--engine_args", json.dumps(said)


def caches(folder: Path) -> dict[int, HiddenCache]:
    """By rows."""
    found = [HiddenCache(each, Index.read(each).key) for each in folder.iterdir()]
    return {cache.index.layout.rows: cache for cache in found}


@pytest.mark.parametrize(
    "more", [(), ("--features", "1", "5", "3"), ("--packing", "--prefix_attention")]
)
def test_the_states_are_those_of_the_targets_own_forwards(
    more: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("own", "vllm")}
    for name, by in ("own", ()), ("vllm", vllm()):
        done = run(*more, "--hidden_cache_dir", str(places[name]), *by)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM" in done.stdout and "0.00% from the target's own" in done.stdout
    own, by_vllm = caches(places["own"]), caches(places["vllm"])
    assert set(own) == set(by_vllm) and len(own) == 2
    for rows, cache in own.items():
        other = by_vllm[rows]
        assert cache.index.starts.tolist() == other.index.starts.tolist()
        for place in range(rows):
            torch.testing.assert_close(
                other.read_place(place), cache.read_place(place), rtol=1e-3, atol=1e-3
            )
    left = {path.name for path in places["vllm"].rglob("*") if path.is_file()}
    assert left == {"index.bin", "000000.states"}
    read = [*run.flags, *more, "--hidden_cache", "read"]  # type: ignore[attr-defined]
    assert train_heads.main([*read, "--hidden_cache_dir", str(places["vllm"])]) == 0


def test_the_index_says_by_which_settings_states_were_computed(run: Run, tmp_path: Path) -> None:
    def computed_by(**engine: object) -> str:
        place = tmp_path / f"states-{len(engine)}"
        assert run("--hidden_cache_dir", str(place), *vllm(**engine)).returncode == 0
        (said,) = {cache.index.layout.computed_by for cache in caches(place).values()}
        return str(said)

    plain = computed_by()
    assert plain == f"vLLM {vllm_version}" == computed_by(max_model_len=256)
    changed = computed_by(max_model_len=256, hf_overrides={"rms_norm_eps": 2e-6})
    assert changed.startswith(f"{plain} (engine_args ")


def test_an_engine_in_this_process_would_wait_for_itself(run: Run, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.environment, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # type: ignore[attr-defined]
        done = run("--hidden_cache_dir", str(tmp_path / "states"), *vllm())
    assert done.returncode == 2 and "leave VLLM_ENABLE_V1_MULTIPROCESSING unset" in done.stderr


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"max_model_len": 16}, "vLLM reads texts of at most 15 tokens here"),
        ({"no_such_argument": 1}, "cannot run"),
        ({"gpu_memory_utilization": 7}, "less than or equal to 1"),
        ({"hf_overrides": {"rms_norm_eps": 30.0}}, "from the target's own on"),
    ],
)
def test_what_vllm_cannot_do_is_a_sentence(
    engine: dict[str, object], sentence: str, run: Run, tmp_path: Path
) -> None:
    done = run("--hidden_cache_dir", str(tmp_path / "states"), *vllm(**engine))
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr.splitlines()[-1] or sentence in done.stderr
    assert not list((tmp_path / "states").rglob("*.states"))
