"""A target laid over devices; training on one is in `test_many_processes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from medusa_heads.config import HeadsConfig
from medusa_heads.machine.choice import Choice
from medusa_heads.target.target import TargetModel
from medusa_heads.training.arguments.cache import CacheArguments
from medusa_heads.training.arguments.target import TargetArguments
from medusa_heads.training.hidden.device_map import load_placed
from medusa_heads.training.hidden.layout import INDEX_FILE, Index
from medusa_heads.training.runs import setup
from medusa_heads.training.runs.heads import train_heads
from medusa_heads.training.runs.setup import as_target
from tests.conftest import TinyLlama


@pytest.mark.parametrize("place", ["gpu", "cuda:99", 99, -1, "meta", None])
def test_a_place_that_is_no_device_here_is_refused_in_a_sentence(
    place: Any, tiny_llama: TinyLlama, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    arguments = TargetArguments(str(tmp_path), device_map={"": place})
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ValueError, match="device") as refused:
        load_placed(arguments, args, lambda _: None)
    assert repr(place).strip("'") in str(refused.value)


def test_a_target_on_another_gpu_comes_to_that_of_the_run(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was loaded before a launcher's processes had each its own."""
    moved: list[torch.device] = []
    monkeypatch.setattr(TargetModel, "device", torch.device("cuda:0"))
    monkeypatch.setattr(target.model, "to", moved.append)
    for number in (0, 1):
        as_target(target, torch.device("cuda", number))
    assert moved == [torch.device("cuda:1")]
    monkeypatch.setattr(target.model, "hf_device_map", {"": 0}, raising=False)
    as_target(target, torch.device("cuda:1"))
    assert len(moved) == 1


def test_each_of_several_processes_has_the_dtype_in_which_a_target_is_stored(
    tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would measure for itself what is fastest, on machines of two kinds with two outcomes."""
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)

    def choose(use: str, device: torch.device, **_: Any) -> Choice:
        return Choice(device, torch.float32, 1, "as this one measured")

    monkeypatch.setattr("medusa_heads.target.loading.choose", choose)
    for several, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(setup, "several_processes", lambda several=several: several)
        assert as_target(str(tmp_path), torch.device("cpu")).dtype == dtype


def test_a_run_goes_on_in_the_dtype_that_its_target_had(
    tiny_llama: TinyLlama, make_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another is faster, as on another machine."""
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "target")
    for steps, fastest in enumerate((torch.float32, torch.bfloat16), start=1):

        def choose(use: str, device: Any, dtype: Any, fastest: Any = fastest, **_: Any) -> Choice:
            return Choice(device, fastest if dtype == "auto" else getattr(torch, dtype), 1, "")

        monkeypatch.setattr("medusa_heads.target.loading.choose", choose)
        train_heads(
            str(tmp_path / "target"),
            make_rows(8),
            eval_dataset=make_rows(2),
            config=HeadsConfig(num_heads=1),
            output_dir=tmp_path / "run",
            training_args=TrainingArguments(max_steps=steps, use_cpu=True, save_steps=1),
            resume_from_checkpoint="auto",
        )
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


def test_weights_that_the_first_forward_unpacks_are_no_changed_ones(tiny_llama: TinyLlama) -> None:
    """As those of compressed-tensors: a run would end by saying that its target changed."""
    model = tiny_llama()
    model.hf_quantizer = object()

    def unpack(*_: Any) -> None:
        hook.remove()
        model.lm_head.weight.data = model.lm_head.weight * 2

    hook = model.register_forward_pre_hook(unpack)
    target = as_target(model, torch.device("cpu"))
    before = target.weights_digest()
    target.hidden(torch.zeros(1, 3, dtype=torch.long))
    assert target.weights_digest() == before


def test_no_more_rows_at_once_where_there_are_more_gpus(
    target: TargetModel, make_rows: Any, tmp_path: Path
) -> None:
    """One of them learns, and reads the target, unless a launcher starts a process for each."""
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    args._n_gpu = 8  # as transformers counts them
    train_heads(
        target,
        make_rows(9),
        eval_dataset=make_rows(3, seed=1),
        config=HeadsConfig(num_heads=2),
        output_dir=tmp_path / "run",
        training_args=args,
        hidden_cache=CacheArguments("auto", str(tmp_path / "cache")),
    )
    found = [Index.read(file.parent) for file in (tmp_path / "cache").glob(f"*/{INDEX_FILE}")]
    assert sorted(index.layout.batch_size for index in found) == [2, 4]
    assert args.n_gpu == 8  # the caller's own
