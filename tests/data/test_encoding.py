"""Texts become arrays of tokens: the same ones, whichever library encodes."""

import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from medusa_heads.data import encoding
from medusa_heads.data.corpus import draw_windows
from medusa_heads.data.encoding import Encoder, Ragged, begins, prompt_ids
from medusa_heads.inference.bench.prompts import Question, encode_questions
from medusa_heads.inference.regeneration.dialogues import Unanswerable, read_dialogues
from tests.pairs import with_slow
from tests.training import templates

ODD = [
    "\u65e5\u672c",
    "e\u0301",
    "\U0001f468\u200d\U0001f469",
    "</s>",
    " </s> ",
    "\n\n\t",
    "\u00a0",
    "'Ll 1234",
]


def trained(style: str) -> PreTrainedTokenizerFast:
    """A tokenizer in the style of a well-known one, trained on next to nothing."""
    made = Tokenizer(models.BPE(byte_fallback=style == "metaspace", unk_token=None))
    alphabet = [] if style == "metaspace" else pre_tokenizers.ByteLevel.alphabet()
    if style == "metaspace":
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        made.decoder = decoders.ByteFallback()
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    elif style == "digits":
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", *(alphabet if style == "metaspace" else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([__doc__ or "", "def f(x):\n    return x  # 12345"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = [*ODD, *(__doc__ or "").split(), " ", "  ", "x\n", "1", "-", "\u1e9b\u0323"]
    return ["".join(draw.choices(words, k=draw.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize("style", with_slow(["chat"], ["gpt2", "digits", "metaspace"]))
def test_the_fast_library_gives_the_tokens_of_the_usual_one(style: str) -> None:
    pytest.importorskip("fastokens")
    tokenizer: Any = templates.chat_tokenizer() if style == "chat" else trained(style)
    # The last one is encoded by threads.
    encoder, given = Encoder(tokenizer), [*texts(400), "".join(texts(4000))]
    encoder(["x"], special_tokens=True)
    assert encoder.is_fast
    for special in (True, False):
        expected = tokenizer(given, add_special_tokens=special)["input_ids"]
        found = encoder(given, special_tokens=special)
        assert [found.row(number) for number in range(len(given))] == expected
    again = pickle.loads(pickle.dumps(encoder))
    assert again.is_fast and np.array_equal(
        again(given, special_tokens=True).values, encoder(given, special_tokens=True).values
    )


def test_a_library_that_gives_other_tokens_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fastokens = pytest.importorskip("fastokens")
    tokenizer: Any = templates.chat_tokenizer()
    other = fastokens.Tokenizer.from_json_str(trained("gpt2").backend_tokenizer.to_str())
    monkeypatch.setattr("medusa_heads.data.encoding._fast_tokenizer", lambda tokenizer: other)
    encoder = Encoder(tokenizer)
    found = encoder(["def f(x):"], special_tokens=True)
    assert found.row(0) == tokenizer("def f(x):")["input_ids"] and not encoder.is_fast
    assert "fastokens gives other tokens than tokenizers" in caplog.text


@pytest.mark.parametrize("differs", ["added_tokens", "post_processor"])
def test_a_library_that_differs_in_what_the_corpus_does_not_show_is_left_out(
    monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    fastokens = pytest.importorskip("fastokens")
    tokenizer = trained("gpt2")
    tokenizer.add_tokens(["<tool>"])
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state[differs] = None if differs == "post_processor" else state[differs][:-1]
    other = fastokens.Tokenizer.from_json_str(json.dumps(state))
    monkeypatch.setattr("medusa_heads.data.encoding._fast_tokenizer", lambda tokenizer: other)
    encoder = Encoder(tokenizer)
    encoder(["def f(x):"], special_tokens=False)
    assert encoder.is_fast is False


def test_a_tokenizer_that_draws_its_tokens_is_left_to_the_usual_library() -> None:
    tokenizer = trained("gpt2")
    tokenizer.backend_tokenizer.model.dropout = 1e-9  # too little to show in what is compared
    encoder = Encoder(tokenizer)
    encoder(["def f(x):"], special_tokens=False)
    assert encoder.is_fast is False


def test_a_tokenizer_that_may_make_tokens_of_its_own_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As nobody knows without the method that such a tokenizer overrides."""
    tokenizer = trained("gpt2")
    for kind in type(tokenizer).__mro__:
        monkeypatch.delattr(kind, "_encode_plus", raising=False)
    assert encoding._fast_tokenizer(tokenizer) is None


def test_bytes_without_a_token_are_left_out_as_by_the_usual_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a byte-level vocabulary that lacks some; also where only a later text has such a byte."""
    pytest.importorskip("fastokens")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(["some words x\n"], trainers.BpeTrainer())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    rows = ["words", "some\twords \u65e5 some"]
    expected = tokenizer(rows)["input_ids"]
    for hard in (encoding._HARD, ()):
        monkeypatch.setattr(encoding, "_HARD", hard)
        encode = Encoder(tokenizer)
        for row, ids in zip(rows, expected, strict=True):
            assert encode([row], special_tokens=True).row(0) == ids
        assert encode.is_fast is (not hard)


def test_texts_are_encoded_without_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_heads.data.encoding._fast_tokenizer", lambda tokenizer: None)
    tokenizer: Any = templates.chat_tokenizer()
    encoder, given = Encoder(tokenizer), texts(20)
    found = encoder(given, special_tokens=True)
    assert [found.row(n) for n in range(20)] == tokenizer(given)["input_ids"]
    assert encoder.is_fast is False and len(encoder([], special_tokens=True).offsets) == 1


def test_stretches_are_compared_with_those_that_may_begin_with_them() -> None:
    short, whole = Ragged.of([[1, 2], [], [3], [4, 5]]), Ragged.of([[1, 2, 3], [9], [4], [4]])
    assert begins(short.stretches, whole.stretches).tolist() == [True, True, False, False]


def test_a_prompt_that_starts_already_gets_no_second_start() -> None:
    starting = templates.starting_tokenizer()
    alone = starting("x = 1", add_special_tokens=False)["input_ids"]
    for text in ("x = 1", "<s>x = 1"):
        assert prompt_ids(starting, text) == [starting.bos_token_id, *alone]
        assert encode_questions([Question((text,))], starting)[0].tokens[1:] == tuple(alone)
    starting.chat_template = None
    asked = read_dialogues(Dataset.from_dict({"prompt": ["x = 1", "<s>x = 1"]}), starting)
    assert [list(each.ask(0)[0])[1:] for each in asked] == [alone, alone]
    assert prompt_ids(templates.chat_tokenizer(), "x = 1") == alone


def test_a_prompt_is_no_ended_text() -> None:
    ending = templates.starting_tokenizer("<|endoftext|>")
    alone = ending("x = 1", add_special_tokens=False)["input_ids"]
    start, end = ending.bos_token_id, ending.eos_token_id
    assert ending("x = 1")["input_ids"] == [start, *alone, end]
    assert prompt_ids(ending, "x = 1") == [start, *alone]
    assert prompt_ids(ending, "x = 1<|endoftext|>") == [start, *alone, end]
    plain_ids = [*alone, end, end]  # of a tokenizer that puts none there
    starting = templates.starting_tokenizer()
    assert prompt_ids(starting, "x = 1<|endoftext|><|endoftext|>") == [start, *plain_ids]
    ending.chat_template = None
    asked = read_dialogues(Dataset.from_dict({"prompt": ["x = 1"]}), ending)
    assert [list(each.ask(0)[0]) for each in asked] == [[start, *alone]]
    (window,) = draw_windows(["x = 1"], ending, num_prompts=1, prompt_length=1 + len(alone), seed=0)
    assert window[1] == [start, *alone]


def test_an_empty_prompt_is_none_whatever_the_tokenizer_puts_before_it() -> None:
    starting = templates.starting_tokenizer()
    starting.chat_template = None
    (empty,) = read_dialogues(Dataset.from_dict({"prompt": [""]}), starting)
    with pytest.raises(Unanswerable, match="the prompt has no tokens"):
        empty.ask(0)
