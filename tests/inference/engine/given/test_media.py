"""Prompts with images: what is written behind them is what generate() writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from medusa_heads import TargetModel
from medusa_heads.inference.engine import beginning
from medusa_heads.inference.models.training_free import TrainingFreeModel
from scripts.prove.seeing.models import build, prompts
from scripts.prove.seeing.texts import WAYS, as_of_text, blind, both, planted
from tests.inference.conftest import INPUTS
from tests.pairs import with_slow

NEW = 24
MOVING = "qwen3_vl"


@pytest.fixture(scope="module")
def moving() -> TargetModel:
    """An image takes fewer positions than tokens."""
    return TargetModel(build(MOVING))


# Before, transformers said of Qwen3.5 that it reads text alone, and PaliGemma's masks were others:
# both are refused there.
NEWER = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="this transformers is older"
)
KINDS: list[Any] = with_slow(["gemma3", MOVING], ["llava", "qwen2_vl"])
KINDS += [pytest.param(kind, marks=NEWER) for kind in ("paligemma", "qwen3_5")]
GREEDY = ((3, "greedy"), (1, "greedy"))


# All kinds are compared by scripts.prove.seeing.texts; here is one of each way to read images.
@pytest.mark.parametrize("kind", KINDS)
def test_texts_behind_images_are_those_of_generate(kind: str) -> None:
    target = TargetModel(build(kind))
    for rows, way in ((1, "drawn"), *GREEDY) if kind == MOVING else GREEDY:
        inputs = prompts(kind, rows, seed=rows)
        expected_BT, got_BT, stats = both(target, inputs, NEW, **WAYS[way])
        assert torch.equal(got_BT, expected_BT), way
        assert stats.tokens_per_step > 1.5
    without_BT, _, _ = both(target, blind(inputs), NEW, **WAYS["greedy"])
    assert not torch.equal(without_BT, expected_BT)  # the image has a say


def test_positions_that_go_on_as_if_images_were_text_are_noticed(moving: TargetModel) -> None:
    inputs = prompts(MOVING, 1, seed=1)
    expected_BT, _, _ = both(moving, inputs, NEW, **WAYS["greedy"])
    options: Any = WAYS["greedy"] | {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    with patch.object(beginning, "positions_ahead", as_of_text(beginning.positions_ahead)):
        got_BT, _ = planted(moving, inputs, expected_BT, **options)
    assert not torch.equal(got_BT, expected_BT)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", with_slow([MOVING], ["qwen2_vl", "glm4v", "llava"]))
def test_a_next_turn_goes_on_behind_an_image(kind: str, rows: int) -> None:
    target = TargetModel(build(kind))
    plain: Any = target.model
    given: dict[str, Any] = WAYS["greedy"] | {"eos_token_id": None, "pad_token_id": 0}
    said = prompts(kind, rows, seed=5)

    def read() -> dict[str, Any]:
        """The first turn, and what is said next."""
        cache = DynamicCache(config=plain.config)
        first_BT = plain.generate(**said, **given, max_new_tokens=8, past_key_values=cache)
        next_BT = torch.cat([first_BT, torch.arange(20, 25).expand(rows, -1)], dim=1)
        mask_BT = torch.ones_like(next_BT)
        mask_BT[:, : said["input_ids"].shape[1]] = said["attention_mask"]
        return {"input_ids": next_BT, "attention_mask": mask_BT, "past_key_values": cache}

    expected_BT = plain.generate(**read(), **given, max_new_tokens=NEW)
    inputs = read()
    got_BT, stats = planted(target, inputs, expected_BT, **given, max_new_tokens=NEW)
    assert torch.equal(got_BT, expected_BT)
    assert stats.tokens_per_step > 1.5
    if kind == MOVING and rows == 1:  # and the turn after that, from the cache as it was filled
        more = {name: inputs[name] for name in ("input_ids", "past_key_values")}
        more["input_ids"] = torch.cat([got_BT, torch.tensor([[30, 31]])], dim=1)
        again_BT, _ = planted(target, more, expected_BT, **given, max_new_tokens=NEW)
        whole = said | {"input_ids": more["input_ids"]}
        whole["attention_mask"] = torch.ones_like(whole["input_ids"])
        kinds_1T = torch.zeros_like(whole["input_ids"])
        kinds_1T[:, : said["input_ids"].shape[1]] = said["mm_token_type_ids"]
        whole["mm_token_type_ids"] = kinds_1T
        assert torch.equal(again_BT, plain.generate(**whole, **given, max_new_tokens=NEW))


def test_other_positions_of_a_text_are_refused_of_models_that_read_images(
    moving: TargetModel,
) -> None:
    text = blind(prompts(MOVING, 1, seed=0))
    text["position_ids"] = torch.arange(text["input_ids"].shape[1])[None] + 3
    with pytest.raises(ValueError, match="counts positions from the first token"):
        TrainingFreeModel(moving, "suffix").generate(**text, max_new_tokens=4)


def test_text_is_read_as_text_after_an_image(moving: TargetModel) -> None:
    model: Any = TrainingFreeModel(moving, "recycling:7")
    plain: Any = moving.model
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    model.generate(**prompts(MOVING, 2, seed=3), **given)
    text = blind(prompts("smolvlm", 2, seed=4))
    expected_BT = plain.generate(**text, **given)
    assert torch.equal(model.generate(**text, **given), expected_BT)


def test_rows_with_images_join_a_running_batch(moving: TargetModel) -> None:
    model: Any = TrainingFreeModel(moving, "recycling:7")
    plain: Any = moving.model
    given: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    several = [prompts(MOVING, 1, seed=seed, words=10 + seed) for seed in range(3)]
    several.append(blind(several[0]))
    expected = [plain.generate(**inputs, **given) for inputs in several]
    batch, rows = model.running_batch(4), []
    for inputs in several:
        own = {name: value for name, value in inputs.items() if name != "attention_mask"}
        rows.append(batch.add(own.pop("input_ids"), **own, **given))
        batch.step()
    while batch.rows:
        batch.step()
    for row, inputs, expected_1T in zip(rows, several, expected, strict=True):
        assert row.tokens == expected_1T[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", [MOVING, pytest.param("gemma3", marks=pytest.mark.slow)])
def test_tokens_beside_images_are_not_what_was_read(kind: str) -> None:
    """Of texts alone what was read is kept, and that is read on from, whatever came between."""
    target = TargetModel(build(kind))
    plain: Any = target.model
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    text, image = {"input_ids": torch.arange(20, 60)[None]}, prompts(kind, 1, seed=0, words=24)
    other = image | {"pixel_values": image["pixel_values"].flip(0, -1)}
    longer = {"input_ids": torch.arange(20, 63)[None]}
    asked = [text, image, longer, image, other, blind(image)]
    batch = TrainingFreeModel(target, "recycling:7").running_batch(2, kept_bytes=10**9)
    begun = []
    for inputs in asked:
        own = {name: value for name, value in inputs.items() if name != "attention_mask"}
        row = batch.add(own.pop("input_ids"), **own, **given)
        while batch.rows:
            assert not batch.step()
        begun.append(row.begun)
        expected_1T = plain.generate(**inputs, **given)
        assert row.tokens == expected_1T[0, inputs["input_ids"].shape[1] :].tolist()
    assert begun == [0, 0, 40, 0, 0, 0]


def test_a_prompt_that_ends_with_an_image_is_refused_where_that_moves(moving: TargetModel) -> None:
    inputs = prompts(MOVING, 1, seed=0)
    end = int((inputs["input_ids"] == 150).nonzero()[-1, 1]) + 1
    cut = {name: inputs[name][:, :end] for name in (*blind(inputs), "mm_token_type_ids")}
    with pytest.raises(ValueError, match="the prompt ends with an image"):
        TrainingFreeModel(moving, "suffix").generate(**inputs | cut, max_new_tokens=4)


def test_images_without_positions_are_refused(
    moving: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = type(moving.model)
    given = kind.prepare_inputs_for_generation

    def untold(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**given(self, *args, **kwargs), "position_ids": None}

    monkeypatch.setattr(kind, given.__name__, untold)
    with pytest.raises(ValueError, match="tells the target no positions"):
        TrainingFreeModel(moving, "suffix").generate(**prompts(MOVING, 1, 0), max_new_tokens=4)


def test_what_a_model_of_text_would_not_read_is_refused(tiny_llama: Any) -> None:
    model = TrainingFreeModel(TargetModel(tiny_llama()), "suffix")
    kinds = torch.zeros_like(INPUTS["input_ids"])
    with pytest.raises(ValueError, match="token_type_ids"):
        model.generate(**INPUTS, token_type_ids=kinds, max_new_tokens=4)


def test_models_that_are_known_to_read_images_alone_are_loaded(tmp_path: Path) -> None:
    build(MOVING).save_pretrained(tmp_path)
    target = TargetModel.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert type(target.model).__name__ == "Qwen3VLForConditionalGeneration"
    inputs = prompts(MOVING, 1, seed=2)
    expected_BT, got_BT, _ = both(target, inputs, NEW, **WAYS["greedy"])
    assert torch.equal(got_BT, expected_BT)
