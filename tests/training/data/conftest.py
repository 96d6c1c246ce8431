"""A tokenizer for chats, and a target that knows its tokens."""

from typing import Any

import pytest

from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama
from tests.training import templates


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return templates.chat_tokenizer()


@pytest.fixture(scope="module")
def wide(tokenizer: Any, tiny_llama: TinyLlama) -> TargetModel:
    """A target that knows all tokens."""
    return TargetModel(tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=64))
