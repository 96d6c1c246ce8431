"""How many tokens heads draft, as it is asked for."""

from dataclasses import fields

import pytest

from medusa_heads.config import HeadsConfig
from medusa_heads.training.arguments.vocabulary import VocabularyArguments
from medusa_heads.training.data.draft_vocabulary import COVERED, LEAST


@pytest.mark.parametrize(
    ("given", "size", "word"),
    [("auto", None, "auto"), ("all", None, "all"), ("8192", 8192, "auto")],
)
def test_a_number_or_a_word(given: str, size: int | None, word: str) -> None:
    asked = VocabularyArguments(given)
    assert asked.number(HeadsConfig(num_heads=2)) == HeadsConfig(num_heads=2, draft_vocab_size=size)
    assert asked.word() == word


def test_the_help_says_what_is_chosen() -> None:
    (asked,) = fields(VocabularyArguments)
    share = f"at least {LEAST}, that make up {100 * COVERED:g} of 100 held-out tokens"
    assert share in asked.metadata["help"]


@pytest.mark.parametrize("given", ["", "none", "0", "-1", "1.5", "1e4", "²", "9" * 9, "9" * 5000])
def test_what_is_neither_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"^draft_vocab_size must be "):
        VocabularyArguments(given)
