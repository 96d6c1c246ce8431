"""What a corpus asks, turn by turn, and the count of everything that became of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from medusa_heads.errors import MedusaWarning
from medusa_heads.inference.regeneration.answers import (
    EARLIER_TURN,
    EMPTY,
    NO_CONVERSATION,
    NO_QUESTION,
    TEMPLATE,
    TOO_LONG,
    UNKNOWN_TOKENS,
    Accounting,
    Answer,
    Answers,
    Sampling,
)
from medusa_heads.inference.regeneration.dialogues import ChatDialogue, read_dialogues
from medusa_heads.inference.regeneration.regenerate import Regenerated, answer_dialogues
from medusa_heads.inference.regeneration.store import write_rows
from medusa_heads.inference.regeneration.transformers_backend import TransformersBackend
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.inference.speaking import END, FORGETFUL, make_speaker, make_tokenizer

SAMPLING = Sampling(max_new_tokens=6)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "from the corpus"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "also from it"},
]


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    return TargetModel(make_speaker(tiny_llama, make_tokenizer()))


def ask(target: TargetModel, corpus: Dataset, folder: Path, **options: Any) -> Regenerated:
    tokenizer = make_tokenizer(options.pop("template", make_tokenizer().chat_template))
    return answer_dialogues(
        TransformersBackend(target),
        read_dialogues(corpus, tokenizer, **options),
        SAMPLING,
        greedy_share=1.0,
        cache_dir=folder,
        progress=False,
    )


def read(row: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a row, and its supervised stretches."""
    tokenizer = make_tokenizer()
    stretches: list[list[int]] = [[]]
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        if label == -100:
            stretches.append([])
        else:
            stretches[-1].append(token)
    said = [tokenizer.decode(stretch) for stretch in stretches if stretch]
    return str(tokenizer.decode(row["input_ids"])), said  # type: ignore[return-value]


def test_a_conversation_without_tokens_is_skipped(target: TargetModel, tmp_path: Path) -> None:
    template = "{% for said in messages %}{{ said.content }}{% endfor %}"
    for role, content, reason in (("user", "\ud800", TEMPLATE), ("system", "", NO_QUESTION)):
        told = json.dumps([{"role": role, "content": content}])
        corpus = Dataset.from_dict({"messages": [json.dumps(TALK), told]})
        result = ask(target, corpus, tmp_path, template=template)
        assert result.accounting.done == 2 and result.accounting.skipped == {reason: 1}


def test_rows_of_strange_tokens_are_skipped(target: TargetModel, tmp_path: Path) -> None:
    most = target.vocab_size - 1
    rows = [[1, most], None, [1, most + 1], [-1, 2]]
    result = ask(target, Dataset.from_dict({"input_ids": rows}), tmp_path)
    assert result.accounting.done == 1
    assert result.accounting.skipped == {NO_QUESTION: 1, UNKNOWN_TOKENS: 2}


@pytest.mark.parametrize(
    ("column", "rows"),
    [("input_ids", [[1.5]]), ("input_ids", [3]), ("input_ids", ["ab"]), ("text", [5])],
)
def test_a_column_of_something_else_is_refused(column: str, rows: list[Any]) -> None:
    with pytest.raises(ValueError, match=f"expected .* in the column '{column}', got "):
        read_dialogues(Dataset.from_dict({column: rows}), make_tokenizer())


def test_documents_that_are_missing_are_left_out() -> None:
    corpus = Dataset.from_dict({"text": ["one two three\n" * 20, None]})
    assert len(read_dialogues(corpus, make_tokenizer(), num_prompts=2, prompt_length=4)) == 2


def test_the_last_turn_is_answered_after_the_corpus_own_words(
    target: TargetModel, tmp_path: Path
) -> None:
    corpus = Dataset.from_dict({"messages": [TALK, TALK[:3]]})
    result = ask(target, corpus, tmp_path, turns="last")
    asked = "u:hia:from the corpus<end>u:and?a:"
    for row in result.rows:
        text, (answer,) = read(row)
        assert text == asked + answer and answer != "also from it"
    assert result.accounting.asked == result.accounting.done == 2
    assert result.rows[0] == result.rows[1]  # greedy: the same question has one answer


def test_all_turns_are_answered_with_the_targets_own_words_before_them(
    target: TargetModel, tmp_path: Path
) -> None:
    result = ask(target, Dataset.from_dict({"messages": [TALK]}), tmp_path, turns="all")
    ((text, (first, second)),) = map(read, result.rows)
    first = first.removesuffix(END)  # the template puts one there in any case
    assert text == f"u:hia:{first}{END}u:and?a:{second}"
    assert result.accounting.asked == result.accounting.done == 2


def words(text: str) -> list[int]:
    encoded: list[int] = make_tokenizer()(text)["input_ids"]
    return encoded


@pytest.mark.parametrize(("template", "rows"), [(None, 1), (FORGETFUL, 2)])
def test_a_template_that_rewrites_earlier_answers_makes_rows_of_their_own(
    template: str | None, rows: int
) -> None:
    tokenizer = make_tokenizer() if template is None else make_tokenizer(template)
    corpus = Dataset.from_dict({"messages": [TALK]})
    (dialogue,) = read_dialogues(corpus, tokenizer, turns="all")
    assert isinstance(dialogue, ChatDialogue) and dialogue.turns == 2
    for turn, answer in enumerate(("hello there<end>", "more<end>")):
        dialogue.ask(turn)
        dialogue.take(words(answer))
    assert len(dialogue.rows()) == rows
    texts = [read(row) for row in dialogue.rows()]
    if rows == 1:
        said = ["hello there<end>", "more<end>"]
        assert texts == [("u:hia:hello there<end>u:and?a:more<end>", said)]
    else:
        assert texts[0] == ("u:hia:hello there<end>", ["hello there<end>"])
        assert texts[1] == ("u:hia:hel<end>u:and?a:more<end>", ["more<end>"])


def test_rows_of_one_conversation_are_one_document(tmp_path: Path) -> None:
    """Else training would see what is held out: an answer that a later row quotes."""
    tokenizer = make_tokenizer(FORGETFUL)
    corpus = Dataset.from_dict({"messages": [TALK, TALK[:1], TALK]})
    dialogues = list(read_dialogues(corpus, tokenizer, turns="all"))
    for dialogue in dialogues:
        for turn in range(dialogue.turns):
            dialogue.ask(turn)
            dialogue.take(words("hello there<end>"))
    assert [len(dialogue.rows()) for dialogue in dialogues] == [2, 1, 2]
    rows = write_rows(((d.row, row) for d in dialogues for row in d.rows()), tmp_path)
    assert rows["document"][:] == [0, 0, 1, 2, 2]


def test_what_is_no_conversation_is_skipped(target: TargetModel, tmp_path: Path) -> None:
    unknown = json.dumps([{"role": "human", "content": "hi"}])
    corpus = Dataset.from_dict({"messages": ["hello", json.dumps(TALK[:1]), "[7]", unknown]})
    result = ask(target, corpus, tmp_path)
    assert result.accounting.done == 1 and result.accounting.skipped == {NO_CONVERSATION: 3}
    details = [problem["detail"] for problem in result.accounting.problems]
    assert "is a text and not a list" in details[0] and "has the role 'human'" in details[2]


def test_shards_share_the_rows_and_write_what_one_process_writes(
    target: TargetModel, tmp_path: Path
) -> None:
    corpus = Dataset.from_dict({"prompt": [f"{i}?" for i in range(600)]})
    tokenizer = make_tokenizer()
    whole = list(read_dialogues(corpus, tokenizer))
    assert [dialogue.row for dialogue in whole] == list(range(600))
    shards = [read_dialogues(corpus, tokenizer, shard=(i, 7)) for i in range(7)]
    assert [len(shard) for shard in shards] == [86] * 5 + [85] * 2
    for i, shard in enumerate(shards):
        asked = [(d.row, list(d.ask(0)[0])) for d in shard]
        assert asked == [(d.row, list(d.ask(0)[0])) for d in whole[i::7]]
    with pytest.raises(ValueError, match=r"expected rows in shard 8 of 9, got 5 in all"):
        read_dialogues(corpus.select(range(5)), tokenizer, shard=(8, 9))
    few = corpus.select(range(9))
    alone = ask(target, few, tmp_path / "alone").rows
    for i in range(2):
        part = ask(target, few, tmp_path / str(i), shard=(i, 2)).rows
        assert part["input_ids"][:] == alone["input_ids"][i::2]


def test_prompts_are_texts_or_conversations(target: TargetModel, tmp_path: Path) -> None:
    with pytest.warns(MedusaWarning, match="continues as they are, without its chat template"):
        texts = ask(target, Dataset.from_dict({"prompt": ["x = ", "y"]}), tmp_path)
    assert [read(row)[0][:4] for row in texts.rows] == ["x = ", "y" + read(texts.rows[1])[0][1:4]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MedusaWarning)
        ask(target, Dataset.from_dict({"prompt": [f"x {END}"]}), tmp_path)  # what a template writes
        talks = ask(target, Dataset.from_dict({"prompt": [TALK[:1]]}), tmp_path)
    assert read(talks.rows[0])[0].startswith("u:hia:")


def test_everything_asked_is_done_failed_or_skipped(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """One of each fate, in one corpus."""
    tokenizer = make_tokenizer()
    model = make_speaker(tiny_llama, tokenizer)
    model.config.max_position_embeddings = 64
    corpus = Dataset.from_dict(
        {
            "messages": [
                TALK,
                [{"role": "assistant", "content": "nobody asked"}],
                [{"role": "user", "content": "long " * 20}, *TALK[1:]],
                [],
                [{"role": "user", "content": "hush"}],
            ]
        }
    )
    asked = tokenizer.apply_chat_template(
        corpus[4]["messages"], add_generation_prompt=True, return_dict=False
    )

    class Hushed(TransformersBackend):
        """Has nothing to say to one of the questions."""

        def answer(self, *args: Any) -> Iterator[Answers]:
            empty = Answer(failure=EMPTY)
            for pairs in super().answer(*args):
                yield [(p, empty if list(p.input_ids) == asked else a) for p, a in pairs]

    result = answer_dialogues(
        Hushed(TargetModel(model)),
        read_dialogues(corpus, tokenizer, turns="all"),
        SAMPLING,
        cache_dir=tmp_path,
        progress=False,
    )
    accounting = result.accounting
    assert (accounting.asked, accounting.done) == (7, 2)
    assert accounting.skipped == {NO_QUESTION: 2, TOO_LONG: 1, EARLIER_TURN: 1}
    assert accounting.failed == {EMPTY: 1}
    assert [p["row"] for p in accounting.problems] == [1, 2, 2, 3, 4]
    assert str(accounting).startswith("asked 7 = done 2 + failed 1 (1 empty answer) + skipped 4 (")
    with pytest.raises(AssertionError):
        Accounting(asked=1).check()


def test_all_problems_are_counted_and_the_first_are_listed() -> None:
    accounting = Accounting(asked=1500)
    for row in range(1500):
        accounting.missed("failed", EMPTY, row, 0, "")
    accounting.check()
    assert [problem["row"] for problem in accounting.problems] == list(range(1000))


def test_a_template_that_refuses_is_a_skipped_row(target: TargetModel, tmp_path: Path) -> None:
    template = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}q"
    corpus = Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in ("no", "go")]})
    result = ask(target, corpus, tmp_path, template=template)
    assert result.accounting.skipped == {TEMPLATE: 1} and result.accounting.done == 1
    assert "never" in result.accounting.problems[0]["detail"]


def test_not_one_answer_is_an_error(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not one answer: asked 1 = done 0 .* nothing to answer"):
        ask(target, Dataset.from_dict({"prompt": [""]}), tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": ["a"]}, "expected a corpus with one of the columns"),
        ({"prompt": []}, "the corpus is empty"),
    ],
)
def test_corpora_that_ask_nothing_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dialogues(Dataset.from_dict(columns), make_tokenizer())


def test_what_a_corpus_needs_of_the_tokenizer() -> None:
    talks = Dataset.from_dict({"messages": [TALK]})
    with pytest.raises(ValueError, match=r"no chat template: put it .* as chat_template\.jinja"):
        read_dialogues(talks, make_tokenizer(None))
    with pytest.raises(ValueError, match="needs the target's tokenizer"):
        read_dialogues(talks, None)
    assert len(read_dialogues(Dataset.from_dict({"input_ids": [[1]]}), None)) == 1
