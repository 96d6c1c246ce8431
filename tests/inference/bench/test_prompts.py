"""Prompts from files: their forms, their order, and several turns."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.inference.bench.prompts import (
    Prompt,
    Question,
    batches_of,
    choose_prompts,
    encode_questions,
    read_questions,
)

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A token a character."""
    vocabulary = {chr(code): code for code in (10, *range(32, 127))}
    words = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="~")


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_prompts_from_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first\n\n second \nthi\x0crd\n")
    assert read_questions(lines) == [Question((t,)) for t in ("first", " second ", "thi\x0crd")]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a\\nb", "category": "x"}\n\n{"text": "c", "id": 1}\n')
    assert read_questions(rows) == [Question(("a\nb",), "x"), Question(("c",))]


def test_marks_and_line_ends_of_other_systems_are_no_part_of_a_prompt(tmp_path: Path) -> None:
    for name, rows in {
        "a.txt": "one\r\n\r\ntwo",
        "a.jsonl": '{"text": "one"}\r\n{"text": "two"}',
    }.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + rows.encode())
        assert read_questions(tmp_path / name) == [Question(("one",)), Question(("two",))]


def test_questions_of_spec_bench(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "math", "turns": ["one", "two"], "reference": ["1"]}
    (tmp_path / "question.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert read_questions(tmp_path / "question.jsonl") == [Question(("one", "two"), "math", True)]


def test_a_conversation_is_what_its_user_asks(tokenizer: Any, tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}]
    rows: list[Any] = [{"messages": [*talk, talk[0]]}, {"messages": [system, *talk]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_questions(tmp_path / "chats.jsonl")
    assert read == [Question(("q", "q"), chat=True), Question(("q",), chat=True, system="s")]
    assert encode_questions(read[1:], tokenizer) == [Prompt(ids("s\n\nq\n\n"))]
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}a"
    assert encode_questions(read[1:], tokenizer) == [Prompt(ids("ss;uq;a"))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n \n", "holds no prompts"),
        ("bad.jsonl", '{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
        ("key.jsonl", '{"question": "a"}\n', "line 1: expected an object with a string"),
        ("list.jsonl", '["prompt"]\n', "line 1: expected an object"),
        ("number.jsonl", '{"prompt": 3}\n', "line 1: expected an object"),
        ("none.jsonl", '{"turns": []}\n', "line 1: expected an object"),
        ("turn.jsonl", '{"turns": ["a", ""]}\n', "a list of strings under 'turns'"),
        ("talk.jsonl", '{"messages": []}\n', "or messages of a user under 'messages'"),
        ("odd.jsonl", '{"messages": [3]}\n', "expected texts of a user and an assistant under"),
        (
            "tool.jsonl",
            '{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}\n',
            "expected texts of a user and an assistant under",
        ),
        (
            "image.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n',
            "expected texts of a user and an assistant under",
        ),
        ("kind.jsonl", '{"prompt": "a", "category": 3}\n', "a string under 'category', got 3"),
        ("half.jsonl", '{"prompt": "a\\ud800"}\n', "line 1 holds half a character"),
        ("half.jsonl", '{"turns": ["a", "\\udfff"]}\n', "line 1 holds half a character"),
        ("deep.jsonl", '{"prompt": ' + "[" * 100_000, "line 1 is not JSON .nested too deeply"),
        ("long.jsonl", '{"n": ' + "9" * 5_000, "line 1 is not JSON .a number is too long"),
        ("latin.txt", b"caf\xe9\n", "not UTF-8"),
    ],
)
def test_unreadable_prompts_are_refused(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / name)
    with pytest.raises(ValueError, match="found none"):
        read_questions(tmp_path / "missing.txt")


def test_turns_without_a_template(tokenizer: Any) -> None:
    one, two = encode_questions([Question(("ab",)), Question(("q", "r"), "x", True)], tokenizer)
    assert one == Prompt(ids("ab"))
    assert two.tokens == ids("q\n\n") and two.category == "x" and two.follow_up is not None
    after = two.follow_up(list(ids("yes")))
    assert after == Prompt(ids("q\n\nyes\n\nr\n\n"), "x")


def test_turns_in_the_targets_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    text, asked = encode_questions([Question(("ab",)), Question(("q", "r"), "x", True)], tokenizer)
    assert text.tokens == ids("ab")  # a prompt that is no question is taken as it is
    assert asked.tokens == ids("uq;a") and asked.follow_up is not None
    assert asked.follow_up(list(ids("yes~"))) == Prompt(ids("uq;ayes;ur;a"), "x")
    with pytest.raises(ValueError, match=r"the chat template refuses it \(not that"):
        encode_questions([Question(("no",), chat=True)], tokenizer)


def test_a_prompt_without_tokens_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        encode_questions([Question(("a",)), Question(("",))], tokenizer)


def test_prompts_are_chosen_from_all_categories_in_turn() -> None:
    a, b, c, long = Prompt((1,), "x"), Prompt((2,), "x"), Prompt((3,), "y"), Prompt((4,) * 9, "y")
    assert choose_prompts([a, b, long, c], 9, longest=8) == ([a, c, b], 1)
    assert choose_prompts([a, b, long, c], 2) == ([a, long], 0)
    with pytest.raises(ValueError, match="all 1 prompts have more than 8 tokens"):
        choose_prompts([long], 1, longest=8)


def test_batches_are_full_of_one_category_then_mixed_and_hold_no_prompt_twice() -> None:
    a, b, c, d = (Prompt((i,), "x" if i < 3 else "y") for i in range(4))
    assert batches_of([a, d, b, c], 2) == [[a, b], [c, d]]
    assert batches_of([a, d, b, c], 3) == [[a, b, c]]  # one is left out
    assert batches_of([a, d, b, c], 1) == [[a], [b], [c], [d]]
    with pytest.raises(ValueError, match="a batch of 5 rows needs as many prompts, got 4: give"):
        batches_of([a, d, b, c], 5)


def test_one_object_over_many_lines_is_no_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[\n{"prompt": "a"}\n]')
    with pytest.raises(ValueError, match=r"save it as \.jsonl, one a line"):
        read_questions(tmp_path / "p.json")
    (tmp_path / "p.JSONL").write_text('{"prompt": "a"}\n')
    assert [question.turns for question in read_questions(tmp_path / "p.JSONL")] == [("a",)]
