"""What of a row goes to vLLM; the states themselves are compared in tests/vllm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_heads.training.hidden import extracted
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


def test_states_of_another_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever learnt from them would not notice."""
    found = {"token_ids": torch.tensor([5, 7]), "hidden_states": torch.zeros(2, 1, 4)}
    connector = SimpleNamespace(
        load_hidden_states=lambda _: found, cleanup_hidden_states=lambda _: None
    )
    monkeypatch.setattr(extracted, "import_vllm", lambda _: connector)
    made = SimpleNamespace(kv_transfer_params={"hidden_states_path": "place/a"})
    states: Any = SimpleNamespace(
        computed_by="vLLM", target=SimpleNamespace(dtype=torch.float32), _columns=[0]
    )
    with pytest.raises(OSError, match="vLLM wrote the hidden states of another text to place/a"):
        VllmStates._read(states, made, [5, 6])
