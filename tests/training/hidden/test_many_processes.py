"""Several processes (gloo, CPU) learn what one does with the same rows in each step, however the
target lies; launch files are read in `test_launch_files.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from medusa_heads.checkpoint.mtp_checkpoint import MTP_WEIGHTS
from medusa_heads.cli.train_heads import main
from medusa_heads.training.hidden.layout import Index, shard_name
from tests.conftest import TinyLlama
from tests.inference.native_modules import needs_modules, write_checkpoint
from tests.training.hidden.test_launched import IN_NODES, LAUNCHED
from tests.training.processes import Failed, run_together

ROWS = 8  # of a step, whatever the number of processes
STREAMED = ["--streaming", "--shuffle_buffer", "1"]
STOPPED = ["--load_best_model_at_end", "--early_stopping_patience", "1", "--save_steps", "1"]


@pytest.fixture
def flags(tiny_llama: TinyLlama, make_rows: Callable[..., Dataset], tmp_path: Path) -> list[str]:
    """Of a run of 4 steps, but for how many rows each process reads in one."""
    target = tiny_llama(vocab_size=61, hidden_size=16, num_attention_heads=4, num_key_value_heads=4)
    target.save_pretrained(tmp_path / "target")
    rows = tmp_path / "rows.jsonl"
    made = [*make_rows(20, length=20), *make_rows(20, length=14, seed=1)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    flags = ["--model_name_or_path", str(tmp_path / "target"), "--dataset", str(rows)]
    flags += ["--eval_rows", "5", "--num_heads", "2", "--max_steps", "4", "--save_steps", "2"]
    flags += ["--no_load_best_model_at_end", "--learning_rate", "1e-2", "--max_length", "32"]
    flags += ["--save_total_limit", "9", "--logging_steps", "1"]
    return [*flags, "--training_args", '{"use_cpu": true, "disable_tqdm": true}']


def run_of(flags: Sequence[str], count: int, output: Path, *more: str) -> list[str]:
    """The flags of such a run in so many processes, into a folder."""
    rows = str(ROWS // count)
    batch = ["--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows]
    return [*flags, *batch, "--output_dir", str(output), *more]


def learnt(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "medusa_lm_head.safetensors")


def check_equal(found: Path, expected: Path, most: float = 1e-6) -> None:
    """Within rounding (or bitwise), and not because nothing was learnt."""
    now, then = learnt(found), learnt(expected)
    start = load_file(expected / "checkpoint-2" / "model.safetensors")
    assert any((start[f"heads.{name}"] - end).abs().max() > 1e-3 for name, end in then.items())
    for name, tensor in then.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=most)


def check_left(printed: Path, count: int, last: str, runs: int = 1) -> None:
    """No process goes on before the first has written what is left of a run."""
    for rank in range(count):
        assert (printed / f"{rank}.txt").read_text().count(f" {last}") == runs


def loaded(folder: Path) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load((folder / "run.yaml").read_text())["target_loaded"]
    return found


BEYOND = ["--max_steps", "6"]  # the end of an epoch, of which 3 rows are left to the fifth step
KINDS = {"plain": [], "streamed": STREAMED, "stopped": STOPPED}
BOTH = {"streamed and stopped": [*STREAMED, *STOPPED]}


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (2, BOTH),
        *(pytest.param(count, KINDS, marks=pytest.mark.slow) for count in (2, 4, 8)),
    ],
)
def test_so_many_learn_what_one_does(
    count: int, kinds: dict[str, list[str]], flags: list[str], tmp_path: Path
) -> None:
    for name, more in kinds.items():
        assert main(run_of(flags, 1, tmp_path / f"one-{name}", *more)) == 0
    together = [run_of(flags, count, tmp_path / name, *more) for name, more in kinds.items()]
    run_together(count, tmp_path / "printed", together)
    check_left(tmp_path / "printed", count, "report.json", len(kinds))
    for name in kinds:
        check_equal(tmp_path / name, tmp_path / f"one-{name}")
        figures = json.loads((tmp_path / name / "metrics.json").read_text())
        alone = json.loads((tmp_path / f"one-{name}" / "metrics.json").read_text())
        assert (figures["best_step"] is None) == ("stopped" not in name), "else these are the last"
        for key in ("eval_loss", "eval_tokens_per_step_16", "steps", "best_step"):
            assert figures[key] == pytest.approx(alone[key], abs=1e-5), (name, key)
        assert loaded(tmp_path / name)["processes"] == count


@pytest.mark.slow
@needs_modules
def test_a_targets_own_modules(flags: list[str], tmp_path: Path) -> None:
    """They are measured before they learn, and averaged for all that."""
    target = write_checkpoint("glm4_moe", tmp_path / "with_modules", right=False)
    at = flags.index("--num_heads")
    flags = [*flags[:at], *flags[at + 2 :], "--mtp", "--model_name_or_path", str(target)]
    assert main(run_of(flags, 1, tmp_path / "one")) == 0
    run_together(2, tmp_path / "printed", [run_of(flags, 2, tmp_path / "two")])
    check_left(tmp_path / "printed", 2, "metrics.json")
    found, expected = (load_file(tmp_path / name / MTP_WEIGHTS) for name in ("two", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--tensor_parallel"], STREAMED, ["--shard_target"]])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    more: list[str], flags: list[str], tmp_path: Path
) -> None:
    more = [*more, *BEYOND]
    run_together(2, tmp_path / "first", [run_of(flags, 2, tmp_path / "whole", *more)])
    killed = run_of(flags, 2, tmp_path / "killed", *more)
    with pytest.raises(Failed, match="killed"):
        run_together(2, tmp_path / "second", [killed], kill_in_step=3)
    assert not (tmp_path / "killed" / "checkpoint-4").exists()
    run_together(2, tmp_path / "third", [[*killed, "--resume_from_checkpoint", "last"]])
    check_equal(tmp_path / "killed", tmp_path / "whole", most=0)


@pytest.mark.slow
def test_a_target_that_processes_share(flags: list[str], tmp_path: Path) -> None:
    """By layers or by matrices; one writes a cache, which both then read."""
    assert main(run_of(flags, 1, tmp_path / "one")) == 0
    longer = ["--max_steps", "6"]
    assert main(run_of(flags, 1, tmp_path / "one-longer", *longer)) == 0
    cache = ["--hidden_cache_dir", str(tmp_path / "cache"), "--hidden_cache"]
    kinds = {
        "layers": ["--shard_target"],
        "matrices": ["--tensor_parallel", *cache, "auto"],
        "layers-longer": ["--shard_target", *cache, "auto", *longer],
        "read-longer": ["--tensor_parallel", *cache, "read", *longer],
    }
    together = [run_of(flags, 2, tmp_path / name, *more) for name, more in kinds.items()]
    run_together(2, tmp_path / "printed", together)
    one = yaml.safe_load((tmp_path / "one" / "run.yaml").read_text())
    for name in kinds:
        check_equal(tmp_path / name, tmp_path / ("one-longer" if "longer" in name else "one"))
        two = yaml.safe_load((tmp_path / name / "run.yaml").read_text())
        assert two["target_weights_sha256"] == one["target_weights_sha256"]
        assert f"--{two['target_loaded']['shared_by']}" == kinds[name][0]
    printed = (tmp_path / "printed" / "0.txt").read_text()
    first, again = re.findall(r", ([\d.]+ \w+) to be written", printed)
    assert first != "0 bytes" == again and printed.count("read from") == 3


@pytest.mark.slow
def test_a_copy_of_the_target_in_each_of_two_nodes(flags: list[str], tmp_path: Path) -> None:
    assert main(run_of(flags, 1, tmp_path / "one")) == 0
    run = run_of(flags, 4, tmp_path / "nodes")
    sizes = {**LAUNCHED, **IN_NODES, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    run_together(4, tmp_path / "printed", [run], environ=sizes)
    check_equal(tmp_path / "nodes", tmp_path / "one")
    assert loaded(tmp_path / "nodes")["shared_by"] == "shard_target"


def test_a_target_laid_over_devices(flags: list[str], tmp_path: Path) -> None:
    places = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}
    more = ["--device_map", json.dumps(places), "--attn_implementation", "eager"]
    more += ["--kind", "hydra"]  # which read the token embeddings as well
    assert main(run_of(flags, 1, tmp_path / "one", "--kind", "hydra")) == 0
    assert main(run_of(flags, 1, tmp_path / "laid", *more)) == 0
    check_equal(tmp_path / "laid", tmp_path / "one")
    told = loaded(tmp_path / "laid")
    assert told["modules_by_device"] == {"disk": 4, "cpu": 2}
    assert told["attn_implementation"] == "eager"


@pytest.mark.parametrize(
    "place", [*(pytest.param(place, marks=pytest.mark.slow) for place in (4, 21)), None]
)
def test_a_cache_that_fails_in_one_process_ends_all(
    place: int | None, flags: list[str], tmp_path: Path
) -> None:
    """A row that is damaged, which the second process reads, in its first step or in its third; or
    states that cannot be kept. The first process says which, in one sentence."""
    cached = [*flags, "--hidden_cache", "auto", "--hidden_cache_dir", str(tmp_path / "cache")]
    if place is None:
        target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
        target.model.embed_tokens.weight.data[3] = float("nan")
        target.save_pretrained(tmp_path / "target")
        said = "the target's hidden states are not finite"
    else:
        assert main(run_of(cached, 1, tmp_path / "alone")) == 0
        damage(max((tmp_path / "cache").iterdir(), key=rows_of), place)
        said = f"is damaged (row {place})"
    with pytest.raises(Failed) as failed:
        together = run_of(cached, 2, tmp_path / "together")
        run_together(2, tmp_path / "printed", [together], ends_alone=True)
    sentence = str(failed.value).splitlines()[-1]
    assert sentence.startswith("train-heads: ") and said in sentence
    assert "Traceback" not in (tmp_path / "printed" / "1.txt").read_text()


def rows_of(cache: Path) -> int:
    return Index.read(cache).layout.rows


def damage(cache: Path, place: int) -> None:
    index = Index.read(cache)
    with (cache / shard_name(0)).open("r+b") as file:
        file.seek(index.shape(0).states + int(index.starts[place]) * index.position_bytes)
        file.write(bytes(16))
