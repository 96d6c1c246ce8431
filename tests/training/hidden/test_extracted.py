"""What of a row goes to vLLM; the states themselves are compared in tests/vllm."""

from __future__ import annotations

from typing import Any

from medusa_heads.training.hidden.extracted import VllmStates, documents


def test_a_packed_row_is_read_document_by_document() -> None:
    assert documents({"input_ids": [5, 6, 7]}) == [[5, 6, 7]]
    assert documents({"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 0]}) == [
        [5, 6],
        [7],
        [8],
    ]
    assert documents({"input_ids": [5], "position_ids": [0]}) == [[5]]


def test_files_lie_on_disk_in_groups_of_rows() -> None:
    states: Any = object.__new__(VllmStates)  # no vLLM is needed to divide
    states._token_bytes, states.passing_bytes = 10, 100
    texts = [[[0] * 4, [0] * 3], [[0] * 4], [[0] * 25], [[0]], [[0] * 9]]
    assert list(states._groups(texts)) == [texts[:2], texts[2:3], texts[3:]]
    assert list(states._groups(texts[:1])) == [texts[:1]]
