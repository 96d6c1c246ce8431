"""Rows with images: what training reads of them is what the model makes of its processor's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from medusa_heads import MedusaModel, train_heads
from medusa_heads.config import IGNORED
from medusa_heads.training.arguments.data import DataArguments
from medusa_heads.training.data.pack import hidden_of
from medusa_heads.training.data.prepare import TrainingData, load_corpora, prepare_data
from medusa_heads.training.data.split import distinct_documents
from medusa_heads.training.hidden.cached_rows import row_name
from tests.training import seeing


def prepared(kind: str, file: str, by: Any = None, **settings: Any) -> TrainingData:
    told = DataArguments([file], eval_dataset=[file], **{"max_length": 400, **settings})
    given = seeing.target(kind), *load_corpora(told), by or seeing.processor(kind), told
    return prepare_data(*given, num_heads=2, seed=0)


def own_inputs(kind: str, messages: Any, folder: Path) -> Any:
    """What the processor makes of messages, whose images are named as it wants it."""
    talk = json.loads(json.dumps(messages).replace('"path": "', f'"path": "{folder}/'))
    given = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return seeing.processor(kind).apply_chat_template([talk], **given)


def states(kind: str, inputs: Any) -> Tensor:
    """What the lm_head reads in the model's own forward."""
    target, seen = seeing.target(kind), []
    hook = target.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with hook, torch.no_grad():
        target.model(**inputs)
    return seen[0][0]


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_states_are_those_of_the_models_own_forward(kind: str, tmp_path: Path) -> None:
    data = prepared(kind, seeing.corpus(tmp_path, seeing.SEVERAL))
    target = seeing.target(kind)
    together_BTD = hidden_of(target, data.sight.collate([*data.rows]))
    assert len(data.rows) == len(seeing.SEVERAL)
    for place, (row, said) in enumerate(zip(data.rows, seeing.SEVERAL, strict=True)):
        inputs = own_inputs(kind, said["messages"], tmp_path)
        count = len(row["input_ids"])
        assert row["input_ids"] == inputs["input_ids"][0].tolist()
        expected_TD = states(kind, inputs)
        alone_TD = hidden_of(target, data.sight.collate([row]))[0]
        torch.testing.assert_close(alone_TD, expected_TD)
        torch.testing.assert_close(together_BTD[place, :count], expected_TD, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_exactly_the_assistants_tokens_are_learnt(kind: str, tmp_path: Path) -> None:
    data, words = prepared(kind, seeing.corpus(tmp_path, seeing.SEVERAL)), seeing.tokenizer(kind)
    for row, said in zip(data.rows, seeing.SEVERAL, strict=True):
        learnt = [label for label in row["labels"] if label != IGNORED]
        answers = [turn["content"] for turn in said["messages"] if turn["role"] == "assistant"]
        assert words.decode(learnt) == "".join(f"{answer}</s>" for answer in answers)
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        assert all(label in (IGNORED, token) for token, label in pairs)
        assert len(row["images"]) == str(said).count("'image'")


def test_texts_that_hold_what_stands_for_an_image_are_broken(tmp_path: Path) -> None:
    """Else the target would look for an image there, in a batch with others."""
    rows = [*seeing.SEVERAL, {"messages": seeing.talk("What does <image> mean?")}]
    with pytest.raises(ValueError, match=r"chats.jsonl:5: its text holds what stands for an image"):
        prepared("llava", seeing.corpus(tmp_path, rows))


def test_images_without_a_place_are_told_to_a_target_that_reads_such(tmp_path: Path) -> None:
    rows: list[Any] = [*seeing.SEVERAL, {"messages": seeing.talk("What?"), "images": ["a.png"]}]
    with pytest.raises(ValueError, match=r"chats.jsonl:5: 'images' holds 1 images.* for 0"):
        prepared("llava", seeing.corpus(tmp_path, rows))


def test_a_processor_that_is_not_there_is_told_of_once(tmp_path: Path) -> None:
    told = DataArguments([seeing.corpus(tmp_path, seeing.SEVERAL)], max_length=200)
    given = seeing.target("llava"), *load_corpora(told), seeing.tokenizer("llava"), told
    with pytest.raises(ValueError, match=r"3 broken rows.*no processor of '' is known"):
        prepare_data(*given, num_heads=2, seed=0)


@pytest.mark.parametrize("kind", seeing.KINDS)
def test_another_image_changes_the_states_of_the_answer(kind: str, tmp_path: Path) -> None:
    file = seeing.corpus(tmp_path, seeing.SEVERAL)
    row = prepared(kind, file).rows[0]
    before_BTD = hidden_of(seeing.target(kind), seeing_batch(kind, file, row))
    other = {
        **row,
        "images": [{"path": str(seeing.save_image(tmp_path / "z.png", 7)), "bytes": None}],
    }
    with pytest.raises(ValueError, match="others than when it was prepared"):
        seeing_batch(kind, file, other)
    seeing.save_image(tmp_path / "a.png", 7)  # of the same size: the same tokens stand for it
    (tmp_path / "chats.jsonl").touch()
    again = prepared(kind, file).rows[0]
    assert again["input_ids"] == row["input_ids"] and again["seen"] != row["seen"]
    after_BTD = hidden_of(seeing.target(kind), seeing_batch(kind, file, again))
    learnt_T = torch.tensor(row["labels"]) != IGNORED
    assert ((before_BTD - after_BTD)[0, learnt_T].norm(dim=1) > 1e-3).all()


def seeing_batch(kind: str, file: str, row: Any) -> Any:
    return prepared(kind, file).sight.collate([row])


def test_rows_of_one_text_and_two_images_are_two(tmp_path: Path) -> None:
    """For the cache of hidden states, and where equal documents are held out together."""
    said = [
        {"messages": seeing.talk(seeing.image(f"{name}.png"), "What is this?")} for name in "ab"
    ]
    data = prepared("gemma3", seeing.corpus(tmp_path, said))  # each takes four tokens
    first, second = data.rows
    assert first["input_ids"] == second["input_ids"]
    assert row_name(first, "learnt") != row_name(second, "learnt")
    assert len({*distinct_documents(np.arange(2), data.rows)}) == 2
    seeing.save_image(tmp_path / "a.png", 9)
    (tmp_path / "chats.jsonl").touch()
    assert prepared("gemma3", str(tmp_path / "chats.jsonl")).facts.sha256 != data.facts.sha256


def test_heads_of_a_target_in_memory_decode_behind_images(tmp_path: Path) -> None:
    """By its processor, where positions behind an image are not those of tokens."""
    kind, file = "qwen2_5_vl", seeing.corpus(tmp_path, seeing.SEVERAL)
    told: Any = {"output_dir": tmp_path / "heads", "eval_dataset": file, "max_length": 200}
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True)
    words = seeing.processor(kind)
    target = seeing.target(kind)
    train_heads(target, file, tokenizer=words, training_args=args, **told)
    model: Any = MedusaModel.from_pretrained(str(tmp_path / "heads"), target=target)
    asked = [turns["messages"][:1] for turns in seeing.SEVERAL[:3]]
    named = json.loads(json.dumps(asked).replace('"path": "', f'"path": "{tmp_path}/'))
    given: dict[str, Any] = {"padding": True, "padding_side": "left"}
    inputs = words.apply_chat_template(
        named,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=given,
    )
    wanted: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain: Any = target.model
    assert torch.equal(model.generate(**inputs, **wanted), plain.generate(**inputs, **wanted))


def test_images_within_tables_are_read_as_their_files_are(tmp_path: Path) -> None:
    seeing.corpus(tmp_path, seeing.SEVERAL)
    rows = []
    for said in seeing.SEVERAL:
        parts = [part for turn in said["messages"] for part in turn["content"] if "path" in part]
        blank = json.loads(re.sub(r', "path": "[^"]*"', "", json.dumps(said["messages"])))
        images = [{"bytes": (tmp_path / part["path"]).read_bytes()} for part in parts]
        rows.append({"messages": json.dumps(blank), "images": images})
    Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    beside, within = (
        prepared("gemma3", f"{tmp_path}/chats.{kind}") for kind in ("jsonl", "parquet")
    )
    assert within.facts == beside.facts  # the hash of the images among them
    assert within.rows[0]["images"][0]["bytes"] == (tmp_path / "a.png").read_bytes()
    batches = [data.sight.collate([*data.rows]) for data in (within, beside)]
    assert torch.equal(*(batch["media"]["pixel_values"] for batch in batches))


def test_texts_in_parts_are_what_they_are_in_lines(tmp_path: Path) -> None:
    """A processor begins a text otherwise than a tokenizer, and without images nobody asks one."""
    rows = [
        {
            "messages": [
                {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in said
            ]
        }
        for said in (seeing.talk(f"<image> {n}?", answer=f"It is {n}.") for n in "123")
    ]
    file = seeing.corpus(tmp_path, rows)
    Dataset.from_list([{**row, "images": None} for row in rows]).to_parquet(
        tmp_path / "chats.parquet"
    )
    lines, parts = prepared("llava", file), prepared("llava", f"{tmp_path}/chats.parquet")
    assert lines.facts == parts.facts


def test_rows_are_cut_behind_whole_images_alone(tmp_path: Path) -> None:
    """The first answer of this row ends with token 66, its second image begins behind token 72."""
    said = seeing.talk(seeing.image("a.png"), "What is this?")
    more = seeing.talk(seeing.image("b.png"), "And this?", answer="It is a house.")
    file = seeing.corpus(tmp_path, [{"messages": said + more}, *seeing.SEVERAL[:2]])
    for size, images in ((70, 1), (73, None), (87, None), (88, 2), (150, 2)):
        found = [row["images"] for row in prepared("llava", file, max_length=size).rows]
        assert len(found) == (2 if images is None else 3)
        assert images is None or len(found[0]) == images


def test_rows_that_hold_some_images_are_left_out_where_these_then_are_others(
    tmp_path: Path,
) -> None:
    """As where a processor cuts only a single image into tiles."""
    by = seeing.processor("llava")
    usual = type(by).replace_image_token

    class Tiling(type(by)):  # type: ignore[misc]
        def replace_image_token(self, image_inputs: Any, image_idx: int, **more: Any) -> str:
            found: str = usual(self, image_inputs, image_idx, **more)
            return found if len(image_inputs["pixel_values"]) == 1 else found[: len(found) // 2]

    said = seeing.talk(seeing.image("a.png"), "What is this?")
    more = seeing.talk(seeing.image("b.png"), "And this?", answer="It is a house.")
    file = seeing.corpus(tmp_path, [{"messages": said + more}, *seeing.SEVERAL[:2]])
    by.__class__ = Tiling
    assert len(prepared("llava", file, by, max_length=64).rows) == 2
    assert len(prepared("llava", file, by, max_length=200).rows) == 3
