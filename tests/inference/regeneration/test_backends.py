"""Who answers makes no difference to the answer: not the batch, not the backend, not the order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from datasets import Dataset

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import MedusaHeads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.regeneration import transformers_backend
from medusa_heads.inference.regeneration.answers import (
    EMPTY,
    Answer,
    Answers,
    Backend,
    Sampling,
    as_answer,
)
from medusa_heads.inference.regeneration.continuous_backend import ContinuousBackend
from medusa_heads.inference.regeneration.dialogues import read_dialogues
from medusa_heads.inference.regeneration.prompts import Prompt, draw, is_greedy
from medusa_heads.inference.regeneration.regenerate import answer_dialogues, regenerate
from medusa_heads.inference.regeneration.store import AnswerStore
from medusa_heads.inference.regeneration.transformers_backend import (
    HeadsBackend,
    TransformersBackend,
)
from medusa_heads.interop.vllm_engine import that_matter
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.elsewhere import WithoutFloat64
from tests.killed import dies
from tests.pairs import alternately

SAMPLING = Sampling(max_new_tokens=10, temperature=0.9, seed=3)


def prompt_ids(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 199, (3 + i % 4,), generator=generator).tolist() for i in range(count)]


def answers(
    backend: Backend, prompts: Sequence[Prompt], sampling: Sampling = SAMPLING
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}

    source = iter(prompts)
    taken = backend.answer(lambda n: [*islice(source, n)], sampling, lambda count: None)
    for pairs in taken:
        for prompt, answer in pairs:
            assert prompt.key not in found and answer.failure is None
            found[prompt.key] = [int(token) for token in answer.tokens]
    return found


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(tiny_llama())


def make_heads(target: TargetModel) -> Backend:
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    return HeadsBackend(MedusaModel(target, heads, tree="cartesian:3,2"), batch_size=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda target: TransformersBackend(target, batch_size=1),
        lambda target: TransformersBackend(target, batch_size=7),
        make_heads,
        lambda target: ContinuousBackend(target, batch_size=3),
    ],
    ids=["one by one", "sevens", "heads", "continuous"],
)
def test_every_backend_gives_the_same_text(
    make: Callable[[TargetModel], Backend], target: TargetModel
) -> None:
    prompts = [Prompt(ids, is_greedy(row, 0.4), row) for row, ids in enumerate(prompt_ids(12))]
    expected = answers(TransformersBackend(target, batch_size=12), prompts)
    assert len(expected) == 12 and len({tuple(text) for text in expected.values()}) == 12
    assert answers(make(target), prompts[::-1]) == expected


@pytest.mark.parametrize(
    "make", [lambda target: TransformersBackend(target, batch_size=7), make_heads]
)
def test_padding_behind_an_end_is_not_counted_as_made(
    make: Callable[[TargetModel], Backend], tiny_llama: TinyLlama
) -> None:
    target = TargetModel(tiny_llama())
    prompts = iter([Prompt(ids, row % 2 == 0, row) for row, ids in enumerate(prompt_ids(12))])
    target.model.generation_config.eos_token_id = [*range(0, 199, 6)]
    made: list[int] = []
    taken = make(target).answer(lambda n: [*islice(prompts, n)], SAMPLING, made.append)
    # Of an answer that ended at once its end was made.
    lengths = [len(answer.tokens) or 1 for pairs in taken for _, answer in pairs]
    assert sum(made) == sum(lengths) and len({*lengths}) > 3


def test_equal_prompts_get_unequal_samples_and_equal_greedy_text(target: TargetModel) -> None:
    for share, different in ((0.0, 4), (1.0, 1)):
        prompts = [Prompt([5, 6, 7], is_greedy(row, share), row) for row in range(4)]
        texts = answers(TransformersBackend(target), prompts)
        assert len(texts) == 4 and len({tuple(text) for text in texts.values()}) == different


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        (
            "unable to allocate shared memory(shm) for file </torch_7>: No space left on device",
            ValueError,
            r"processes share .*device\): leave num_workers out, or",
        ),
        (
            "unable to open shared memory object </torch_7>: Too many open files",
            RuntimeError,
            "^un",
        ),
    ],
)
def test_too_little_shared_memory_is_named(
    said: str,
    kind: type[Exception],
    told: str,
    target: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which many containers have 64 MB."""

    def submit(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(transformers_backend.ProcessPoolExecutor, "submit", submit)
    backend = TransformersBackend(target, batch_size=1, num_workers=2)
    with pytest.raises(kind, match=told):
        answers(backend, [Prompt([5, 6], True, row) for row in range(2)])


def test_draws_follow_the_distribution() -> None:
    logits_V = torch.tensor([2.0, -torch.inf, 0.5, 1.0, -torch.inf, 0.0, -torch.inf])
    count = 20_000
    numbers = Prompt([1], greedy=False).draws(seed=0, count=count)
    assert numbers.min() >= 0 and numbers.max() < 1
    tokens_B = draw(logits_V.expand(count, -1), torch.from_numpy(numbers))
    expected_V = torch.softmax(logits_V, 0) * count
    seen_V = torch.bincount(tokens_B, minlength=7)
    possible_V = expected_V > 0
    assert not seen_V[~possible_V].any()
    chi_square = ((seen_V - expected_V) ** 2 / expected_V)[possible_V].sum()
    assert chi_square < 16.3  # 0.999 quantile at 3 degrees of freedom


def test_the_ends_of_the_interval_draw_tokens_that_are_possible() -> None:
    scores_BV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    largest = 1 - 2**-24
    assert draw(scores_BV, torch.tensor([0.0, largest])).tolist() == [1, 2]


def test_draws_need_no_double_precision_of_the_device() -> None:
    scores_BV = torch.randn(3, 7, device="meta")
    with WithoutFloat64():
        tokens_B = draw(scores_BV, torch.rand(3, device="meta"))
    assert tokens_B.is_meta and tokens_B.shape == (3,) and tokens_B.dtype == torch.long


def test_draws_of_other_seeds_prompts_and_rows_differ() -> None:
    prompt = Prompt([1, 2], greedy=False)
    others = [
        prompt.draws(1, 4),
        Prompt([1, 3], False).draws(0, 4),
        Prompt([1, 2], False, 1).draws(0, 4),
    ]
    first = prompt.draws(0, 4).tolist()
    assert all(other.tolist() != first for other in others)
    assert prompt.draws(0, 9)[:4].tolist() == first  # longer answers begin with the same numbers


def test_the_targets_own_warpers_are_honoured(tiny_llama: TinyLlama) -> None:
    model = tiny_llama()
    model.generation_config.top_k = 1  # a draw from one token
    backend = TransformersBackend(TargetModel(model))
    drawn = [Prompt(ids, False, i) for i, ids in enumerate(prompt_ids(3))]
    greedy = [Prompt(ids, True, i) for i, ids in enumerate(prompt_ids(3))]
    likeliest = list(answers(backend, greedy).values())
    assert list(answers(backend, drawn).values()) == likeliest


@pytest.mark.parametrize(
    ("make", "asked"),
    alternately([TransformersBackend, ContinuousBackend], [{"top_k": 1}, {"top_p": 1e-6}]),
)
def test_warpers_are_those_that_are_asked_for(
    make: Callable[[TargetModel], Backend], asked: dict[str, Any], target: TargetModel
) -> None:
    drawn = [Prompt(ids, False, i) for i, ids in enumerate(prompt_ids(3))]
    greedy = [Prompt(ids, True, i) for i, ids in enumerate(prompt_ids(3))]
    likeliest = list(answers(make(target), greedy).values())
    sampling = Sampling(10, 0.9, **asked)
    assert sorted(answers(make(target), drawn, sampling).values()) == sorted(likeliest)


def test_offloaded_weights_are_still_usable_afterwards(tiny_llama: TinyLlama) -> None:
    prompts = [Prompt(ids, False, i) for i, ids in enumerate(prompt_ids(3))]
    expected = answers(TransformersBackend(TargetModel(tiny_llama())), prompts)
    model = tiny_llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert answers(TransformersBackend(TargetModel(model)), prompts) == expected
    assert not any(weights.is_inference() for weights in model.parameters())


def test_a_batch_that_does_not_fit_is_halved(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(ids, False, i) for i, ids in enumerate(prompt_ids(7))]
    expected = answers(TransformersBackend(target), prompts)
    generate, sizes = transformers_backend._generate, []

    def small_memory(model: Any, batch: Sequence[Prompt], *rest: Any) -> list[Answer]:
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return generate(model, batch, *rest)

    monkeypatch.setattr(transformers_backend, "_generate", small_memory)
    assert answers(TransformersBackend(target), prompts) == expected
    assert sizes == [7, 3, 1, 2, 4, 2, 2]


def test_answers_end_with_the_end_token_and_an_end_alone_is_none() -> None:
    ends = frozenset({9})
    assert list(as_answer([1, 2, 9, 0, 0], ends).tokens) == [1, 2, 9]
    assert list(as_answer([1, 2, 0], ends).tokens) == [1, 2, 0]
    assert as_answer([9, 0, 0], ends).failure == EMPTY
    assert as_answer([], ends).failure == EMPTY


def test_lossy_heads_are_refused(target: TargetModel) -> None:
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    with pytest.raises(ValueError, match="typical acceptance is lossy"):
        HeadsBackend(MedusaModel(target, heads, tree="chain", acceptance="typical"))
    HeadsBackend(MedusaModel(target, heads, tree="chain", rng="transformers"))


def test_a_killed_run_goes_on_and_gives_the_same_rows(target: TargetModel, tmp_path: Path) -> None:
    """SIGKILL in the middle of a line; then larger batches, and rows as if nothing had happened."""
    prompts = Dataset.from_dict({"input_ids": prompt_ids(200)})
    answers_dir = tmp_path / "answers"
    options: dict[str, Any] = {"max_new_tokens": 12, "progress": False}

    def begin() -> None:
        add, left = AnswerStore.add, 70

        def dying(self: AnswerStore, answers: Answers) -> None:
            nonlocal left
            add(self, answers[:left])
            left -= len(answers)
            if left < 0:
                assert self._own is not None
                self._own.write(b'["0123456789abcdef')
                self._own.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        AnswerStore.add = dying  # type: ignore[assignment]
        regenerate(target, prompts, batch_size=16, cache_dir=answers_dir, **options)

    assert dies(begin)
    (file,) = answers_dir.rglob("answers-*.jsonl")
    whole, _, torn = file.read_bytes().rpartition(b"\n")
    assert torn and whole.count(b"\n") + 1 == 70
    resumed = answer_dialogues(
        TransformersBackend(target, batch_size=200),
        read_dialogues(prompts, None),
        Sampling(12),
        cache_dir=answers_dir,
        progress=False,
    )
    assert (resumed.accounting.done, resumed.accounting.reused) == (200, 70)
    expected = regenerate(target, prompts, batch_size=200, cache_dir=tmp_path / "whole", **options)
    assert resumed.rows.to_dict() == expected.to_dict()


def test_arguments_of_vllm_that_change_answers_are_told_apart() -> None:
    engine = {"quantization": "fp8", "tensor_parallel_size": 2, "hf_token": "secret", "seed": 1}
    assert that_matter(engine) == {"quantization": "fp8", "seed": 1}
