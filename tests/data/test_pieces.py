"""Pieces of a text are the text, also where a decoder takes a run of bytes for one whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from medusa_heads.data.pieces import UNFINISHED, Pieces, as_written

Decode = Callable[[list[int]], str]
GUJARATI = "ગુજરાતી"  # three bytes a letter


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of Llama 2's kind: what is no piece of its own is written in bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "."]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def told(decode: Decode, before: list[int], tokens: list[int], step: int) -> list[str]:
    pieces = Pieces(decode, before)
    found = []
    for start in range(0, len(tokens), step):
        pieces.put(tokens[start : start + step])
        found.append(pieces.next())
    return [*found, pieces.next(whole=True)]


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (GUJARATI, "લખાણ a"),
        (f"a {GUJARATI}", "ઓ."),
        ("éક", "ખ a"),
        ("ક\n\n", "ખ a"),
        ("a 🎉", "🎉 a"),
        (GUJARATI, " a"),
        (GUJARATI, "\ufffd a"),
        ("", f"{GUJARATI} ab."),
    ],
)
def test_a_prompt_that_ends_in_bytes_is_continued(
    prompt: str, answer: str, step: int, tokenizer: Tokenizer
) -> None:
    before = tokenizer.encode(prompt).ids
    tokens = tokenizer.encode(prompt + answer).ids[len(before) :]
    assert "".join(told(tokenizer.decode, before, tokens, step)) == answer


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode(GUJARATI).ids
    tokens = tokenizer.encode(GUJARATI + "ઓખ").ids[len(before) :]
    assert told(tokenizer.decode, before, tokens, 1) == ["", "", "ઓ", "", "", "ખ", ""]


@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_a_text_that_is_cut_in_a_character_keeps_those_before(
    step: int, tokenizer: Tokenizer
) -> None:
    before = tokenizer.encode(GUJARATI).ids
    tokens = tokenizer.encode(GUJARATI + "aઓખ").ids[len(before) :]
    assert "".join(told(tokenizer.decode, before, tokens[:-1], step)) == "aઓ" + 2 * UNFINISHED


# A space is no byte here: it is a piece of its own.
TOKENS = st.integers(1, 260).filter(lambda token: token != 1 + ord(" "))


@settings(deadline=None)
@given(st.text("aક\n", max_size=6), st.lists(TOKENS, max_size=24), st.integers(2, 9))
def test_the_steps_of_a_text_say_nothing_of_it(
    tokenizer: Tokenizer, prompt: str, tokens: list[int], step: int
) -> None:
    """Not of bytes that are no text either."""
    before = tokenizer.encode(prompt).ids
    one_by_one = told(tokenizer.decode, before, tokens, 1)
    assert "".join(told(tokenizer.decode, before, tokens, step)) == "".join(one_by_one)


def test_the_character_that_a_prompt_begins_is_completed(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("aઓ.").ids
    assert "".join(told(tokenizer.decode, tokens[:4], tokens[4:], 1)) == "ઓ."


@pytest.mark.parametrize("begins", [0, 40])
def test_broken_bytes_are_looked_behind_for_a_few_tokens_alone(
    begins: int, tokenizer: Tokenizer
) -> None:
    """However long a run of bytes is, and whether it ever begins with a character."""
    most = 0

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return str(tokenizer.decode(ids))

    before = tokenizer.encode("ક" * 400).ids[begins:]
    assert (
        "".join(told(decode, before, tokenizer.encode("a" + "ખ" * 9).ids[1:], 1)) == "a" + "ખ" * 9
    )
    assert most < 12
    broken = [token for token in before if token % 3] + [1 + 0xFF] * 9
    assert "".join(told(decode, broken, tokenizer.encode(" a").ids[1:], 1)) == " a"
    assert most < 12


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("end", ["", "a", "\u20ac", "\U0001f600"])
@pytest.mark.parametrize("falls_back", [False, True])
def test_a_long_run_of_broken_bytes_is_told_as_it_comes(
    falls_back: bool, end: str, tokenizer: Tokenizer
) -> None:
    """And what came before is not decoded again with each of them."""
    most, whole = 0, tokenizer.decode if falls_back else of_bytes

    def decode(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return whole(ids)

    tokens = [0xA9, 0xE2, 0x82, 0xF0, 0x9F] * 60 + [*end.encode()]
    if falls_back:
        tokens = [1 + byte for byte in tokens]
    pieces = told(decode, [], tokens, 1)
    assert "".join(pieces) == whole(tokens)
    assert len(list(filter(None, pieces))) > 20 and most < 64


@settings(deadline=None)
@given(st.lists(st.integers(0x70, 0xFF), max_size=60), st.integers(2, 9))
def test_broken_bytes_are_those_of_the_whole_text(tokens: list[int], step: int) -> None:
    for size in (1, step):
        assert "".join(told(of_bytes, [], tokens, size)) == of_bytes(tokens)


def test_where_a_library_in_rust_panics_an_exception_is_raised(tokenizer: Tokenizer) -> None:
    """Which those who catch every exception would else not catch."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.decoder = decoders.Strip("a", 0, 2)
    panicking = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with pytest.raises(RuntimeError, match="the tokenizer fails on these tokens"):
        as_written(panicking)([258])
