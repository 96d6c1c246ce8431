"""Folders of models whose files were damaged: one sentence, whatever a library makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.target.loading import find_tokenizer, load_causal_lm, load_tokenizer
from tests.conftest import TinyLlama
from tests.inference.speaking import make_tokenizer

DEEP = "[" * 100_000


def torn(text: str) -> str:
    return text[: len(text) // 2]


def unlike(text: str) -> str:
    return json.dumps(json.loads(text) | {"decoder": 5})


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tokenizer.json", torn),
        ("tokenizer.json", unlike),
        ("tokenizer.json", lambda text: DEEP),
        ("tokenizer_config.json", lambda text: DEEP),
        ("tokenizer_config.json", lambda text: '"x"'),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, file: str, damage: Any) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_text(damage(path.read_text()))
    with pytest.raises((ValueError, OSError)) as refusal:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)
    assert find_tokenizer(str(tmp_path)) is None


def test_a_tokenizer_that_needs_a_missing_package_names_it(tmp_path: Path) -> None:
    """And is not taken for none, of which a run would say that there is no tokenizer."""
    (tmp_path / "own.py").write_text("import no_such_package\n")
    told = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    for read in (load_tokenizer, find_tokenizer):
        with pytest.raises(ImportError, match="no_such_package"):
            read(str(tmp_path), trust_remote_code=True)


@pytest.mark.parametrize("said", ["512", [512], {}])
def test_a_longest_text_that_is_no_number_is_named(tmp_path: Path, said: Any) -> None:
    """Else every text fails, where transformers compares its length with that."""
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": said}))
    with pytest.raises(ValueError, match=f"model_max_length {re.escape(repr(said))}, expected a"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("damage", [{"num_attention_heads": 0}, {"head_dim": 10**400}])
def test_a_size_that_cannot_be_computed_with_is_one_sentence(
    tiny_llama: TinyLlama, tmp_path: Path, damage: dict[str, Any]
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match="expected a causal language model") as refusal:
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "said"),
    [("eos_token_id", "x"), ("eos_token_id", []), ("bos_token_id", [None]), ("top_p", "x")],
)
def test_a_setting_of_another_type_is_named(
    tiny_llama: TinyLlama, tmp_path: Path, key: str, said: Any
) -> None:
    """transformers reads it, and fails at the first text."""
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": True, key: said}))
    with pytest.raises(ValueError, match=f"say {key} {re.escape(repr(said))}, expected"):
        load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)


def test_settings_of_the_right_types_are_taken(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    model = tiny_llama()
    said = {"eos_token_id": [3, 5], "pad_token_id": 0, "do_sample": True, "top_p": 1}
    model.generation_config.update(**said)
    model.save_pretrained(tmp_path)
    read = load_causal_lm(str(tmp_path), dtype="auto", trust_remote_code=False)
    assert read.generation_config is not None
    assert {key: getattr(read.generation_config, key) for key in said} == said
