"""Rows of tokens from documents, completions and conversations."""

import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value

from medusa_heads.data import encoding
from medusa_heads.data.chat import ChatTemplate
from medusa_heads.data.formats import Document, recognise
from medusa_heads.data.sources import as_corpus
from medusa_heads.training.data.tokenise import document_numbers, tokenise
from medusa_heads.training.data.tokeniser import Tokeniser
from tests.training import templates


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templates.chat_tokenizer()


def rows_of(
    tokenizer: Any, rows: list[dict[str, Any]], max_length: int = 512, template: str | None = None
) -> tuple[Dataset, int, int]:
    corpus = as_corpus(Dataset.from_list(rows), "corpus")
    chat = None if template is None else ChatTemplate(tokenizer, template)
    made = tokenise(corpus, Tokeniser(corpus.format, tokenizer, max_length, chat))
    return made.rows, made.cut_documents, made.cut_tokens


def test_documents_end_with_the_end_token_and_are_cut_into_rows(tokenizer: Any) -> None:
    texts = ["def f(x):\n    return x\n", "x"]
    rows, *cut = rows_of(tokenizer, [{"text": text} for text in texts], max_length=4)
    end = tokenizer.eos_token_id
    ids = [tokenizer(text)["input_ids"] + [end] for text in texts]
    blocks = [ids[0][i : i + 4] for i in range(0, len(ids[0]), 4)]
    assert rows["input_ids"][:] == rows["labels"][:] == [*blocks, ids[1]]
    assert rows["document"][:] == [0] * len(blocks) + [1] and cut == [0, 0]


def test_processes_that_are_forked_behind_a_pool_of_threads_make_the_same_tokens() -> None:
    """Of texts that one call encodes by many threads, which no fork has."""
    pytest.importorskip("fastokens")
    tokenizer = templates.chat_tokenizer()
    texts = ["def f(x):\n    return x ** 2\n" * count for count in (8000, 2, 3, 4)]
    made = []
    for num_proc in (None, 2):
        corpus = as_corpus(Dataset.from_dict({"text": texts}), "corpus")
        tokeniser = Tokeniser(corpus.format, tokenizer, 512)
        rows = tokenise(corpus, tokeniser, num_proc).rows
        assert tokeniser._encoder is not None and tokeniser._encoder.is_fast
        made.append([rows[name][:] for name in ("input_ids", "document")])
    assert made[0] == made[1] and len(made[0][0]) > 160


def test_the_library_is_chosen_without_threads_that_forks_would_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("fastokens")
    monkeypatch.setattr(encoding, "_has_threads", None)
    corpus = as_corpus(Dataset.from_dict({"text": ["x = y\n" * 5000] * 3}), "corpus")
    tokeniser = Tokeniser(corpus.format, templates.chat_tokenizer(), 512)
    tokeniser.settle(corpus.rows[:2])
    assert tokeniser._encoder is not None and tokeniser._encoder.is_fast
    assert encoding._has_threads is None
    tokenise(corpus, tokeniser)
    assert encoding._has_threads == os.getpid()


@pytest.mark.parametrize("installed", [True, False])
def test_to_choose_the_library_no_text_is_encoded_whole(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a book that would take as long as to prepare it, and memory besides."""
    if installed:
        pytest.importorskip("fastokens")
    else:
        monkeypatch.setattr(encoding, "_fast_tokenizer", lambda _: None)
    encoded: list[int] = []
    usual = encoding.Encoder._usual

    def counted(self: Any, texts: list[str], special: bool) -> Any:
        encoded.extend(map(len, texts))
        return usual(self, texts, special)

    monkeypatch.setattr(encoding.Encoder, "_usual", counted)
    tokeniser = Tokeniser(recognise(["text"]), templates.chat_tokenizer(), 512)
    tokeniser.settle({"text": ["x = y\n" * 20_000]})
    assert max(encoded, default=0) < 1 << 14
    assert tokeniser._encoder is not None and tokeniser._encoder.is_fast is installed
    assert len(tokeniser._documents([Document("x = y\n" * 20_000)])[0].sources) > 1


def test_a_document_that_ends_already_gets_no_second_end(tokenizer: Any) -> None:
    rows, *_ = rows_of(tokenizer, [{"text": "x<|endoftext|>"}])
    assert rows["input_ids"][0].count(tokenizer.eos_token_id) == 1


def test_a_tokenizer_without_an_end_token_adds_none(tokenizer: Any) -> None:
    bare = templates.chat_tokenizer()
    bare.eos_token = None
    rows, *_ = rows_of(bare, [{"text": "x = 1"}])
    assert rows["input_ids"][0] == bare("x = 1")["input_ids"]


def test_only_the_completion_is_learnt_with_its_end(tokenizer: Any) -> None:
    rows, *_ = rows_of(tokenizer, [{"prompt": "def f():\n", "completion": "    pass\n"}])
    prompt = tokenizer("def f():\n")["input_ids"]
    [ids], [labels] = rows["input_ids"][:], rows["labels"][:]
    assert ids[: len(prompt)] == prompt and labels == [-100] * len(prompt) + ids[len(prompt) :]
    assert tokenizer.decode(ids[len(prompt) :]) == "    pass\n<|endoftext|>"


def test_an_end_that_the_tokenizer_adds_does_not_stand_between_prompt_and_completion() -> None:
    ending = templates.starting_tokenizer("<|endoftext|>")
    rows, *_ = rows_of(
        ending, [{"prompt": "a =", "completion": " 1"}, {"prompt": "", "completion": "b"}]
    )
    assert [ending.decode(ids) for ids in rows["input_ids"]] == [
        "<s>a = 1<|endoftext|>",
        "<s>b<|endoftext|>",
    ]
    assert rows["labels"][1] == [-100, *rows["input_ids"][1][1:]]
    # Nor twice behind a text that has it.
    texts = [{"text": f"a{end}"} for end in ("", "<|endoftext|>", " <|endoftext|>")]
    rows, *_ = rows_of(ending, texts)
    assert [ending.decode(ids) for ids in rows["input_ids"]] == [
        "<s>a<|endoftext|>",
        "<s>a<|endoftext|>",
        "<s>a <|endoftext|>",
    ]


def test_ends_that_a_text_has_itself_stay() -> None:
    """Of a tokenizer that puts none behind it."""
    starting, end = templates.starting_tokenizer(), "<|endoftext|>"
    halves = [(f"q{end}{end}", "x"), (f"q{end}", end), ("q", f"x{end}{end}")]
    rows, *_ = rows_of(
        starting, [{"prompt": prompt, "completion": answer} for prompt, answer in halves]
    )
    learnt = [starting.decode([id for id in ids if id >= 0]) for ids in rows["labels"]]
    assert learnt == [f"x{end}", end, f"x{end}{end}"]


@pytest.mark.parametrize("end", ["", "<|endoftext|>"])
def test_a_text_that_starts_already_gets_no_second_start(end: str) -> None:
    """A chat template has rendered it."""
    starting = templates.starting_tokenizer(end)
    rows, *_ = rows_of(starting, [{"text": text} for text in ("<s>a = 1", "b", "<s>")])
    texts = ["<s>a = 1<|endoftext|>", "<s>b<|endoftext|>", "<s><|endoftext|>"]
    assert [starting.decode(ids) for ids in rows["input_ids"]] == texts
    halves = [("<s>a =", " 1"), ("", "<s>b"), ("<s>", "c"), ("a =", " 1<s>")]
    rows, *_ = rows_of(
        starting, [{"prompt": prompt, "completion": answer} for prompt, answer in halves]
    )
    texts = ["<s>a = 1", "<s>b", "<s>c", "<s>a = 1<s>"]
    assert [starting.decode(ids) for ids in rows["input_ids"]] == [
        f"{text}<|endoftext|>" for text in texts
    ]
    learnt = [starting.decode([id for id in ids if id >= 0]) for ids in rows["labels"]]
    assert learnt == [f"{text}<|endoftext|>" for text in (" 1", "b", "c", " 1<s>")]


def test_a_completion_that_merges_with_the_prompt_keeps_the_prompts_tokens(tokenizer: Any) -> None:
    """The model is handed the prompt alone, and goes on from its tokens."""
    prompt = tokenizer("return ")["input_ids"]
    assert tokenizer("return self")["input_ids"][: len(prompt)] != prompt
    rows, *_ = rows_of(tokenizer, [{"prompt": "return ", "completion": "self"}])
    assert rows["input_ids"][0][: len(prompt)] == prompt
    assert tokenizer.decode(rows["labels"][0][len(prompt) :]) == "self<|endoftext|>"


@pytest.mark.parametrize("with_template", [True, False])
def test_a_completion_that_a_template_has_rendered_is_learnt_up_to_its_end(
    tokenizer: Any, with_template: bool
) -> None:
    """Behind the token that ends its text the target writes nothing."""
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    answers = ["x<|im_end|>\n", "x<|im_end|>", "x<|im_end|>\n<|endoftext|>", "x", "<|im_end|>x\n"]
    corpus = as_corpus(Dataset.from_list([{"prompt": "a\n", "completion": c} for c in answers]), "")
    chat = ChatTemplate(tokenizer, templates.CHATML, stop_ids=stops) if with_template else None
    rows = tokenise(corpus, Tokeniser(corpus.format, tokenizer, 512, chat, stop_ids=stops)).rows
    learnt = [tokenizer.decode([label for label in row if label != -100]) for row in rows["labels"]]
    assert learnt == [*["x<|im_end|>"] * 3, "x<|endoftext|>", "<|im_end|>x\n<|endoftext|>"]


def conversation(answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": answer},
        ]
    }


def test_conversations_are_cut_on_the_right_and_what_that_costs_is_counted(tokenizer: Any) -> None:
    rows = [conversation("x " * 40), conversation("x")]
    whole, *none = rows_of(tokenizer, rows, template=templates.CHATML)
    cut, *lost = rows_of(tokenizer, rows, 30, template=templates.CHATML)
    assert none == [0, 0] and lost == [1, len(whole["input_ids"][0]) - 30]
    assert cut["input_ids"][:] == [whole["input_ids"][0][:30], whole["input_ids"][1]]


def test_a_prompt_that_leaves_no_room_is_a_broken_row(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"corpus row 1: of its \d+ tokens no answer is left"):
        rows_of(tokenizer, [conversation("x")], 5, template=templates.CHATML)


def test_the_turns_of_one_conversation_share_its_document_number(tokenizer: Any) -> None:
    """Held-out documents are drawn by it: no half of a conversation is trained on."""
    talk = conversation("x")["messages"] * 2
    rows, *_ = rows_of(
        tokenizer, [{"messages": talk}, conversation("x")], template=templates.THINKING
    )
    assert rows["document"][:] == [0, 0, 1]


def test_answers_lost_with_later_turns_are_counted(tokenizer: Any) -> None:
    """Of a conversation in two rows, the second is too long by far: its answer is lost."""
    talk = [*conversation("yes")["messages"], {"role": "user", "content": "x " * 50}]
    talk.append({"role": "assistant", "content": "no"})
    whole, *_ = rows_of(tokenizer, [{"messages": talk}], template=templates.THINKING)
    cut, *lost = rows_of(tokenizer, [{"messages": talk}], 40, template=templates.THINKING)
    assert len(whole) == 2 and cut["input_ids"][:] == whole["input_ids"][:1]
    assert lost == [1, sum(label != -100 for label in whole["labels"][1])]


def tokens(*rows: tuple[list[int], list[int]]) -> Dataset:
    kinds = Features({name: List(Value("int32")) for name in ("input_ids", "labels")})
    return Dataset.from_list([{"input_ids": i, "labels": t} for i, t in rows], features=kinds)


def test_rows_that_are_tokens_are_cut_too(caplog: pytest.LogCaptureFixture) -> None:
    ids = list(range(10))
    answered = [-100] * 3 + ids[3:]
    table = tokens((ids, answered), (ids[:3], [-100] * 3), (ids, ids), (ids[:6], answered[:6]))
    corpus = as_corpus(table, "corpus")
    made = tokenise(corpus, Tokeniser(corpus.format, None, 6))
    # Text that is learnt whole is a document, and becomes several rows.
    assert made.rows["input_ids"][:] == [ids[:6], ids[:3], ids[:6], ids[6:], ids[:6]]
    assert made.rows["labels"][0] == answered[:6] and made.rows["labels"][1] == [-100] * 3
    assert made.rows["document"][:] == [0, 1, 2, 2, 3]
    assert (made.cut_documents, made.cut_tokens) == (1, 4)
    assert "1 documents of corpus were longer than max_length 6: 4 supervised" in caplog.text


def test_tokens_of_which_nothing_learnt_is_left_are_a_broken_row() -> None:
    corpus = as_corpus(tokens(([1] * 9, [-100] * 8 + [1]), ([1, 2], [1, 2])), "corpus")
    with pytest.raises(ValueError, match="of its 9 tokens no answer is left within max_length 4"):
        tokenise(corpus, Tokeniser(corpus.format, None, 4))


@pytest.mark.parametrize("max_length", [2, 8])
def test_rows_of_tokens_keep_the_document_that_they_name(max_length: int) -> None:
    table = tokens(*[([1, 2, 3], [-100, 2, 3])] * 4).add_column("document", ["a", "b", "a", None])
    corpus = as_corpus(table, "corpus")
    made = tokenise(corpus, Tokeniser(corpus.format, None, max_length)).rows
    first, second, third, fourth = document_numbers(corpus, made)
    assert first == third and len({first, second, fourth}) == 3


def test_few_rows_are_tokenised_at_once_where_they_are_long(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.training.data.tokenise._BATCH", 8 << 14)

    def batches(text: str, count: int) -> int:
        corpus = as_corpus(Dataset.from_dict({"text": [text] * count}), "corpus")
        tokeniser = Tokeniser(corpus.format, tokenizer, 1 << 20)
        folder = tmp_path / f"{count}"
        folder.mkdir()
        return len(tokenise(corpus, tokeniser, folder=folder).rows.data.to_batches())

    assert batches("a b", 4000) == 1  # each takes memory of all who read the rows
    assert batches("a" * 1600, 200) == 3
