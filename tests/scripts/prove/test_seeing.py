"""The comparison of texts behind images tells what differs, and who does not look."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from scripts.prove.seeing import texts

GIVEN = ["--kinds", "qwen2_vl", "--prompts", "1", "--new_tokens", "12"]


def test_an_exact_type_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert texts.main(GIVEN) == 0
    assert "| qwen2_vl | exact tree | 60 | 0 |" in capsys.readouterr().out


def test_texts_that_differ_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = texts.planted

    def wrong(*given: Any, **options: Any) -> Any:
        got_BT, stats = real(*given, **options)
        got_BT[:, -1] += 1
        return got_BT, stats

    monkeypatch.setattr(texts, "planted", wrong)
    assert texts.main(GIVEN) == 2
    printed = capsys.readouterr()
    assert "| qwen2_vl | MISMATCH | 60 | 5 |" in printed.out
    assert "1 of 1 types are not exact" in printed.err


def test_controls_that_go_unnoticed_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(texts, "as_of_text", lambda moves: moves):
        assert texts.main(GIVEN) == 2
    assert "NOT noticed" in capsys.readouterr().out


def test_other_types_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert texts.main(["--kinds", "mllama"]) == 2
    assert "kinds are gemma3, glm4v" in capsys.readouterr().err
