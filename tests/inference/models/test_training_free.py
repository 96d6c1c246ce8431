"""A target that drafts for itself untrained: its text stays its own, and drafts are accepted."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForImageTextToText, LogitsProcessor, LogitsProcessorList

from medusa_heads import TargetModel
from medusa_heads.inference.adapt.clock import Clock
from medusa_heads.inference.drafters.extra.early_exit import ExitClock
from medusa_heads.inference.drafters.recycling import RecyclingSource
from medusa_heads.inference.models import training_free
from medusa_heads.inference.models.drafted import DraftedModel
from medusa_heads.inference.models.training_free import DRAFTERS, TrainingFreeModel
from medusa_heads.inference.plan import adaptive as adaptive_plan
from medusa_heads.trees.tree import TreeShape
from scripts.prove.tiny_configs import tiny_config
from scripts.prove.tiny_models import random_weights
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.growing import grow
from tests.inference.padded import padded
from tests.inference.reference import reference
from tests.pairs import alternately, with_slow

PAIRED = ("lookahead+suffix", "early_exit+suffix")


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> Any:
    return tiny_llama(vocab_size=24).to(DEVICE)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which layers that model can do without is tried once."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(autouse=True)
def cheap_nodes(monkeypatch: pytest.MonkeyPatch, measured: Path) -> None:
    """A machine on which many nodes pay, as they do not on a model this small."""
    clock = Clock({1: 1.0, 4: 1.02, 8: 1.05, 16: 1.1, 32: 1.3}, learns=False)
    for module in (training_free, adaptive_plan):
        monkeypatch.setattr(module, "target_clock", lambda *_: clock)
    monkeypatch.setattr(ExitClock, "measured", lambda *_: ExitClock(clock, layers=2, first=0.05))
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(measured))


@pytest.mark.parametrize(
    ("drafter", "options"),
    alternately(
        DRAFTERS,
        (
            {"do_sample": False},
            {"do_sample": True, "temperature": 0.3, "top_k": 0},
            {"do_sample": False, "repetition_penalty": 1.2},
        ),
        slow=PAIRED,  # two that are alone in quick ones
    ),
)
def test_equals_generate(model: Any, drafter: str, options: dict[str, Any]) -> None:
    ids_BT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]], device=DEVICE)
    drafted = TrainingFreeModel(model, drafter, rng="transformers")
    for _ in range(2):  # what is recycled is carried from text to text
        torch.manual_seed(3)
        expected_BT = reference(model, input_ids=ids_BT, max_new_tokens=22, **options)
        torch.manual_seed(3)
        got_BT: Any = drafted.generate(ids_BT, max_new_tokens=22, **options)
        assert torch.equal(got_BT, expected_BT)
    # This text hardly repeats itself, and layers of random weights cannot be left out.
    if drafter not in ("suffix", "early_exit"):
        assert drafted.last_stats.tokens_per_step > 1.2


@pytest.mark.parametrize(
    "drafter", with_slow((each for each in DRAFTERS if each not in PAIRED), PAIRED)
)
def test_rows_of_a_batch_equal_generate(model: Any, drafter: str) -> None:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    options |= padded((0, 3, 7, 1, 5), 10) | {"max_new_tokens": 22}
    drafted = TrainingFreeModel(model, drafter)
    got_BT: Any = drafted.generate(**options)
    assert torch.equal(got_BT, reference(model, **options))


def test_recycled_drafts_are_the_latest_successors() -> None:
    source = RecyclingSource(vocab_size=10)
    tree = TreeShape.from_choices([(0,)]).tree(torch.tensor([[3, 5]]))
    logits_BNV = torch.full((1, 2, 10), -9.0)
    logits_BNV[0, 0, [5, 6]] = torch.tensor([9.0, 8.0])  # behind 3: 5, then 6
    logits_BNV[0, 1, [3, 7]] = torch.tensor([9.0, 8.0])  # behind 5: 3, then 7

    def grown(root: int) -> list[int]:
        row = SimpleNamespace(tokens=[1, root])
        state: Any = SimpleNamespace(rows=[row], drawing="greedy", noise=None)
        return grow(root, source.draft(state), 3).tokens

    source.observe(tree, logits_BNV)
    assert grown(3) == [3, 5, 3, 6]
    assert grown(4) == [4]  # never read
    source.observe(tree, -logits_BNV)
    assert 5 not in grown(3)[1:2]


@pytest.mark.parametrize(
    "name", ["x", "recycling:-3", f"recycling:{'9' * 5000}"], ids=["x", "negative", "huge"]
)
def test_unknown_drafter(tiny_llama: TinyLlama, name: str) -> None:
    with pytest.raises(ValueError, match=rf"drafter must be one of auto, suffix, .* got '{name}'"):
        TrainingFreeModel(tiny_llama(), name)


@pytest.mark.parametrize(
    "calibration", [torch.arange(4), torch.full((1, 4), 1 << 20), torch.empty(0, 4).long()]
)
def test_what_is_no_text_to_try_layers_on_is_refused(
    tiny_llama: TinyLlama, calibration: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"calibration must be token ids \[B, T\] from 0 to"):
        TrainingFreeModel(tiny_llama(), "early_exit", calibration=calibration)


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("recycling", {}, "a corpus is continued by the drafters auto"),
        ("auto", {"calibration": torch.tensor([[1, 2]])}, "'auto' tries nothing"),
        ("early_exit:1+suffix", {"calibration": torch.tensor([[1, 2]])}, "tries nothing"),
        ("early_exit+suffix", {"compile": True}, "leave compile out"),
        ("early_exit:99+suffix", {}, "leaves one out, got 'early_exit:99"),
        ("auto", {"acceptance": "x"}, "acceptance"),
    ],
)
def test_what_is_refused_is_refused_before_a_corpus_is_read(
    tiny_llama: TinyLlama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    options: dict[str, Any],
    message: str,
) -> None:
    reads: list[Any] = []
    monkeypatch.setattr(training_free, "find_corpus", lambda *a, **_: reads.append(a[0]))
    model = tiny_llama()
    options |= {"corpus": [[1, 2, 3]]}
    with pytest.raises(ValueError, match=message):
        TrainingFreeModel(model, drafter, **options)
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=message):
        TrainingFreeModel.from_pretrained(tmp_path / "target", drafter, **options)
    assert not reads
    TrainingFreeModel.from_pretrained(tmp_path / "target", corpus=options["corpus"])
    assert reads == [[[1, 2, 3]]]


@pytest.mark.parametrize("drafter", ["auto", "lookahead", "early_exit:1"])
def test_a_copy_is_a_decoder_of_its_own(model: Any, drafter: str) -> None:
    """With a copy of the target, and a lock that nobody else waits for."""
    decoder = TrainingFreeModel(model, drafter, compile=False)
    given: dict[str, Any] = {**padded((0,), 11), "do_sample": False, "max_new_tokens": 20}
    expected_BT = reference(model, **given)
    decoder.generate(**given)
    with decoder._lock:
        copied = copy.deepcopy(decoder)
        got_BT: Any = copied.generate(**given)
    assert torch.equal(got_BT, expected_BT)
    assert copied.target.model is not model
    assert torch.equal(torch.as_tensor(decoder.generate(**given)), expected_BT)


class LooksAhead(LogitsProcessor):
    """Asks a decoder what comes next, in the middle of that decoder's own text."""

    def __init__(self, decoder: TrainingFreeModel) -> None:
        self.decoder = decoder

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.decoder.generate(input_ids, max_new_tokens=2, do_sample=False)
        return scores

    def __deepcopy__(self, memo: Any) -> LooksAhead:
        return self  # and of the same decoder


@pytest.mark.parametrize("word", [False, "steps", "capture"])
def test_a_decoder_is_not_called_within_its_own_text(model: Any, untraced: None, word: Any) -> None:
    decoder = TrainingFreeModel(model, "recycling:4", compile=word, compile_backend="eager")
    given: dict[str, Any] = {**padded((0,), 11), "do_sample": False, "max_new_tokens": 9}
    faults: list[str] = []

    def call() -> None:
        with pytest.raises(ValueError, match=r"call the target's own generate\(\) there") as fault:
            decoder.generate(**given, logits_processor=LogitsProcessorList([LooksAhead(decoder)]))
        faults.append(str(fault.value))

    thread = threading.Thread(target=call, daemon=True)  # which may wait for ever
    thread.start()
    thread.join(timeout=120)
    assert faults
    assert torch.equal(torch.as_tensor(decoder.generate(**given)), reference(model, **given))
    if word == "steps":  # nor is another that shares its cache
        other = TrainingFreeModel(decoder.target, "recycling:4")
        with pytest.raises(ValueError, match="in the middle of a text"):
            other.generate(**given, logits_processor=LogitsProcessorList([LooksAhead(decoder)]))


@pytest.mark.parametrize("word", [True, "steps"])
def test_what_is_compiled_is_not_copied(model: Any, word: Any) -> None:
    decoder = TrainingFreeModel(model, "recycling:4", compile=word, compile_backend="eager")
    with pytest.raises(ValueError, match="cannot be copied: make another one of a copy of target"):
        copy.deepcopy(decoder)


def test_no_decoder_is_pickled(model: Any) -> None:
    drafted = DraftedModel(model, copy.deepcopy(model), tree="chain:3", compile=False)
    for decoder in (drafted, TrainingFreeModel(model, compile=False)):
        name = type(decoder).__name__
        with pytest.raises(ValueError, match=f"a {name} cannot be pickled: make it with {name}"):
            pickle.dumps(decoder)
        assert copy.copy(decoder).target is decoder.target


@pytest.mark.parametrize("drafter", with_slow(["auto"], ["recycling", "suffix", "lookahead"]))
def test_a_vocabulary_that_was_resized_is_refused(tiny_llama: TinyLlama, drafter: str) -> None:
    model, ids = tiny_llama(vocab_size=97), torch.arange(1, 13)[None]
    model.generation_config.pad_token_id = 0
    free = TrainingFreeModel(model, drafter)
    free.generate(ids, max_new_tokens=8, do_sample=False)
    model.resize_token_embeddings(130, mean_resizing=False)
    with pytest.raises(ValueError, match=r"vocabulary has changed from 97 to 130: make the dec"):
        free.generate(ids, max_new_tokens=8, do_sample=False)
    with pytest.raises(ValueError, match="vocabulary has changed from 97 to 130"):
        free.running_batch()
    anew = TrainingFreeModel(model, drafter)
    expected = model.generate(ids, max_new_tokens=18, do_sample=False)
    got: Any = anew.generate(ids, max_new_tokens=18, do_sample=False)
    assert torch.equal(got, expected)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_vl"])
def multimodal(request: pytest.FixtureRequest) -> Any:
    """A tiny model with its vision tower."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(request.param))
    model.generation_config.eos_token_id = None
    return random_weights(model, (0.15, 0.15))


def test_multimodal_targets_write_text_of_text(multimodal: Any) -> None:
    """transformers gives them an empty dict of images, and to some several positions a token."""
    prompt = torch.tensor([[5, 17, 3, 42, 8]])
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = multimodal.generate(prompt, **options)
    model = TrainingFreeModel(
        TargetModel(multimodal), "suffix", corpus=[expected[0].tolist()], deterministic=True
    )
    got: Any = model.generate(prompt, **options)
    assert torch.equal(got, expected)
    assert model.last_stats is not None and model.last_stats.tokens_per_step > 2


def test_a_target_that_accelerate_moves_while_its_weights_want_gradients(
    tiny_llama: TinyLlama,
) -> None:
    ids_1T = torch.arange(3, 9)[None]
    expected = reference(tiny_llama(), inputs=ids_1T, max_new_tokens=12, do_sample=False)
    model = tiny_llama().requires_grad_(True)  # as transformers loads one
    cpu_offload(model, execution_device=torch.device("cpu"))
    drafted = TrainingFreeModel(model, "recycling")
    text: Any = drafted.generate(ids_1T, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, expected)
    batch = drafted.running_batch()
    row = batch.add(ids_1T, max_new_tokens=12, do_sample=False)
    while batch.rows:
        assert batch.step() == {}
    assert row.tokens == expected[0, 6:].tolist()
