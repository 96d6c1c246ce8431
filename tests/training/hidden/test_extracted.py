"""What of a row goes to vLLM; the states themselves are compared in tests/vllm."""

from __future__ import annotations

from medusa_heads.training.hidden.extracted import documents


def test_a_packed_row_is_read_document_by_document() -> None:
    assert documents({"input_ids": [5, 6, 7]}) == [[5, 6, 7]]
    assert documents({"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 0]}) == [
        [5, 6],
        [7],
        [8],
    ]
    assert documents({"input_ids": [5], "position_ids": [0]}) == [[5]]
