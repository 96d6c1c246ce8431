"""Answers on disk: of one backend and one set of settings, and whole."""

from pathlib import Path

import pytest

from medusa_heads.inference.regeneration.answers import Answer
from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.store import AnswerStore


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    prompt = Prompt([1, 2], greedy=True)
    store = AnswerStore(tmp_path, {"who": "me"})
    store.add([(prompt, Answer([5, 6], remarks=("odd",)))])
    store.flush()
    again = AnswerStore(tmp_path, {"who": "me"}).get(prompt)
    assert again is not None and (list(again.tokens), again.remarks) == ([5, 6], ("odd",))
    assert AnswerStore(tmp_path, {"who": "you"}).get(prompt) is None
    (part,) = store.folder.glob("part-*")
    part.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"part-.* is damaged .*: remove it"):
        AnswerStore(tmp_path, {"who": "me"})
