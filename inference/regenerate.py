"""The target answers prompts itself: the training text that heads learn most from.

Heads guess what the target will say, not what a corpus says, so they are trained on the target's
own continuations. The work is cut into batches, each written to disk when it is done: a run that
was interrupted goes on where it stopped, and the same call made again reads instead of generating.

Shapes: B batch, T tokens (prompt, left-padded, then continuation).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from medusa_heads.target import TargetModel

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is not generated text."""


def regenerate(
    target: TargetModel,
    prompts: Dataset,
    *,
    max_new_tokens: int,
    batch_size: int = 128,
    greedy_share: float = 0.5,
    temperature: float = 0.7,
    seed: int = 0,
    cache_dir: str | os.PathLike[str],
    num_workers: int = 1,
    progress: bool = True,
) -> Dataset:
    """The target's own continuations of prompts, made with its `generate`.

    Args:
        target: as loaded; generation runs in its dtype, on its device.
        prompts: a dataset with a column `input_ids`; batches of unequal lengths are padded left.
        max_new_tokens: tokens after each prompt; fewer where the target ends its text.
        batch_size: rows a `generate` call. 128 is near the best for a small target on a CPU.
        greedy_share: share of the rows decoded greedily, spread evenly; the rest is sampled.
        temperature: of the sampled rows.
        seed: of the sampling. Equal arguments give equal rows.
        cache_dir: finished batches are kept here, under a key of everything that decides them.
        num_workers: processes that share the batches, each with its share of the CPU's threads; on
            a CPU two small processes outrun one large one. The calling script needs the usual
            `if __name__ == "__main__":` where there is more than one.
        progress: show a progress bar, in tokens.

    Returns:
        A dataset in the order of the prompts: `input_ids` (prompt, continuation, ending with the
        end-of-text token where there is one) and `labels`, which equal `input_ids` on the
        continuation and are -100 on the prompt.

    Raises:
        ValueError: no prompts, an impossible setting, or a text longer than the target's context.
    """
    _check(target, prompts, max_new_tokens, batch_size, greedy_share, temperature)
    from datasets import concatenate_datasets, load_from_disk

    prompt_ids: list[list[int]] = list(prompts["input_ids"])
    settings = {
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "greedy_share": greedy_share,
        "temperature": temperature,
        "seed": seed,
    }
    folder = Path(cache_dir) / _key(target, prompt_ids, settings)
    greedy, sampled = _split(len(prompt_ids), greedy_share)
    batches = [(rows, False) for rows in _chunks(greedy, batch_size)]
    batches += [(rows, True) for rows in _chunks(sampled, batch_size)]
    parts = [folder / f"part-{index:05d}" for index in range(len(batches))]

    if all(part.exists() for part in parts):
        logger.info("reusing %d continuations from %s", len(prompt_ids), folder)
    else:
        total = len(prompt_ids) * max_new_tokens
        with tqdm(
            total=total,
            desc="target's text",
            unit="tok",
            unit_scale=True,
            mininterval=0.5,
            disable=not progress,
        ) as bar:
            jobs = [
                _Batch(
                    prompts=[prompt_ids[row] for row in rows],
                    max_new_tokens=max_new_tokens,
                    temperature=temperature if do_sample else None,
                    # Each batch has its own seed, so that neither order nor resuming matters.
                    seed=seed * 1_000_003 + index,
                    part=parts[index],
                )
                for index, (rows, do_sample) in enumerate(batches)
            ]
            missing = [job for job in jobs if not job.part.exists()]
            bar.update(total - sum(job.tokens for job in missing))
            workers = min(num_workers, len(missing))
            if workers > 1 and target.device.type == "cpu":
                _generate_side_by_side(target.model, missing, workers, bar)
            else:
                for job in missing:
                    before = bar.n
                    _generate_part(target.model, job, partial(bar.update, len(job.prompts)))
                    bar.update(before + job.tokens - bar.n)  # ended texts took no steps

    merged = concatenate_datasets([load_from_disk(str(part)) for part in parts])
    position = {row: place for place, row in enumerate(greedy + sampled)}
    return merged.select([position[row] for row in range(len(prompt_ids))])


def _check(
    target: TargetModel,
    prompts: Dataset,
    max_new_tokens: int,
    batch_size: int,
    greedy_share: float,
    temperature: float,
) -> None:
    if "input_ids" not in prompts.column_names or len(prompts) == 0:
        raise ValueError("expected at least one prompt in a column 'input_ids', got none")
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(
            f"expected max_new_tokens and batch_size of at least 1, got {max_new_tokens} and "
            f"{batch_size}"
        )
    if not 0.0 <= greedy_share <= 1.0:
        raise ValueError(f"expected a greedy_share between 0 and 1, got {greedy_share}")
    if temperature <= 0.0:
        raise ValueError(
            f"expected a temperature above 0, got {temperature}: for greedy text alone set "
            "greedy_share to 1"
        )
    lengths = [len(ids) for ids in prompts["input_ids"]]
    if min(lengths) == 0:
        raise ValueError(f"prompt {lengths.index(0)} is empty: give it at least one token")
    longest, limit = max(lengths) + max_new_tokens, target.max_positions
    if limit is not None and longest > limit:
        raise ValueError(
            f"{longest} tokens (prompt and continuation) do not fit the target's context of "
            f"{limit}: ask for fewer new tokens or shorter prompts"
        )


def _key(target: TargetModel, prompt_ids: Sequence[Sequence[int]], settings: dict[str, Any]) -> str:
    """Everything that decides the text: weights and dtype, decoding defaults, prompts, settings."""
    digest = hashlib.sha256(target.weights_digest().encode())
    described = {
        "dtype": str(target.dtype),
        "generation_config": target.model.generation_config.to_dict(),
        "settings": settings,
        "prompts": [list(ids) for ids in prompt_ids],
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _split(num_rows: int, greedy_share: float) -> tuple[list[int], list[int]]:
    """Greedy and sampled rows, spread so that every stretch of rows has the same mixture."""
    greedy = [r for r in range(num_rows) if int((r + 1) * greedy_share) > int(r * greedy_share)]
    chosen = set(greedy)
    return greedy, [row for row in range(num_rows) if row not in chosen]


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True)
class _Batch:
    """What is generated together; greedy where the temperature is None."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    temperature: float | None
    seed: int
    part: Path

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.max_new_tokens


_worker_model: Any = None


def _generate_side_by_side(model: Any, jobs: list[_Batch], workers: int, bar: tqdm) -> None:
    """The batches in processes of their own, which share the model's memory."""
    threads = max(torch.get_num_threads() // workers, 1)
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(model, threads)
    )
    try:
        running = {pool.submit(_generate_in_worker, job): job for job in jobs}
        for finished in as_completed(running):
            finished.result()
            bar.update(running[finished].tokens)
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(model: Any, threads: int) -> None:
    global _worker_model
    torch.set_num_threads(threads)
    _worker_model = model


def _generate_in_worker(job: _Batch) -> None:
    _generate_part(_worker_model, job, lambda: None)


def _generate_part(model: Any, job: _Batch, on_token: Callable[[], object]) -> None:
    texts = _generate(
        model,
        job.prompts,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        seed=job.seed,
        on_token=on_token,
    )
    _write_part(texts, job.part)


def _generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
    on_token: Callable[[], object],
) -> list[dict[str, list[int]]]:
    """One batch, greedy where the temperature is None, as rows of `input_ids` and `labels`."""
    from transformers import StoppingCriteriaList

    ends = _end_tokens(model)
    pad = model.generation_config.pad_token_id
    pad = pad if pad is not None else next(iter(ends), 0)
    width = max(len(ids) for ids in prompts)
    input_ids_BT = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts])
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])

    def count(seen_BT: Tensor, _scores: Any, **_: Any) -> Tensor:
        on_token()
        return torch.zeros(len(seen_BT), dtype=torch.bool, device=seen_BT.device)

    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        torch.manual_seed(seed)
        output_BT = model.generate(
            input_ids_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            stopping_criteria=StoppingCriteriaList([count]),
            **({"do_sample": False} | sampling),
        )
    rows = []
    for prompt, generated in zip(prompts, output_BT[:, width:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(generated) if token in ends), len(generated))
        text = generated[:end]  # behind the end stands padding
        rows.append({"input_ids": [*prompt, *text], "labels": [IGNORED] * len(prompt) + list(text)})
    return rows


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)


def _write_part(texts: list[dict[str, list[int]]], part: Path) -> None:
    """Write one batch beside its place, then rename: a part that exists is whole."""
    from datasets import Dataset, Features, List, Value
    from datasets.utils import disable_progress_bars, enable_progress_bars

    features = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    part.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{part.name}-", dir=part.parent))
    disable_progress_bars()  # this module has a bar of its own
    try:
        Dataset.from_list(texts, features=features).save_to_disk(str(staging))
        os.rename(staging, part)
    except OSError:
        if not part.exists():  # another process may have written the same part first
            raise
    finally:
        enable_progress_bars()
        shutil.rmtree(staging, ignore_errors=True)
