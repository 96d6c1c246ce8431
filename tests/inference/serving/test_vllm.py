"""The parts of vLLM's plugin that need no vLLM; tests/vllm runs the whole of it."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_heads.checkpoint.stored_heads import StoredHeads
from medusa_heads.config import HeadsConfig
from medusa_heads.inference.serving import vllm
from medusa_heads.inference.serving.vllm import check_bare_logits, check_target, last_rows


def test_importing_the_plugin_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # whoever imports it, or of it, fails
    monkeypatch.delitem(sys.modules, vllm.__name__)
    assert importlib.import_module(vllm.__name__) is not vllm


@pytest.mark.parametrize(
    ("sampled", "num_drafted", "rows"),
    [
        ([[7], [8], [9]], None, [0, 1, 2]),  # nothing was drafted: a position each
        ([[7, 7, 7], [8], [9, 9]], [2, 2, 2], [2, 3, 7]),  # all, none and one accepted
        ([[7], [8, 8]], [0, 3], [0, 2]),  # the first has only read its prompt
        ([[], [8, 8], [9]], [0, 1, 0], [0, 2, 3]),  # the first has not read all of it
    ],
)
def test_the_last_token_of_each_request_is_found(
    sampled: list[list[int]], num_drafted: list[int] | None, rows: list[int]
) -> None:
    assert last_rows(sampled, num_drafted) == rows


def stored(**target: Any) -> StoredHeads:
    config = HeadsConfig(hidden_size=8, vocab_size=32)
    return StoredHeads(config, {}, {"name_or_path": "org/model", "lm_head_sha256": None} | target)


def test_the_right_target_is_accepted() -> None:
    check_target(stored(), {"hidden_size": 8, "vocab_size": 32})
    check_target(stored(lm_head_sha256="ab"), {"lm_head_sha256": "ab"})
    check_target(stored(), {"lm_head_sha256": "ab"})  # converted heads do not know theirs


@pytest.mark.parametrize(
    "found", [{"hidden_size": 16}, {"vocab_size": 33}, {"lm_head_sha256": "cd"}]
)
def test_another_target_is_refused_with_both_figures(found: dict[str, Any]) -> None:
    (name, value) = next(iter(found.items()))
    with pytest.raises(ValueError, match=f"another target.*org/model.*{name}.*{value}"):
        check_target(stored(lm_head_sha256="ab"), found)


def test_a_correction_is_refused_where_logits_are_scaled_or_capped() -> None:
    """Also in the language model of a multimodal target."""
    for scale, cap in ((0.5, None), (1.0, 30.0), (1.0, None)):
        processor = SimpleNamespace(scale=scale, soft_cap=cap)
        text = SimpleNamespace(lm_head=object(), logits_processor=processor)
        for target in (text, SimpleNamespace(get_language_model=lambda text=text: text)):
            if (scale, cap) == (1.0, None):
                check_bare_logits(target)
                continue
            with pytest.raises(ValueError, match="which corrected heads have not learnt"):
                check_bare_logits(target)
