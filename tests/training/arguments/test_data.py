"""Flags of corpora."""

from pathlib import Path
from typing import Any

import pytest

from medusa_heads.cli.flags.arguments import parse_arguments
from medusa_heads.training.arguments.data import DataArguments


def parsed(*argv: str) -> DataArguments:
    """What the flags give; the corpus must be named among them."""
    return parse_arguments((DataArguments,), argv, prog="x", description="")[0]


def test_one_name_or_several(tmp_path: Path) -> None:
    assert parsed("--dataset", "stdlib").eval_dataset is None
    assert parsed("--dataset", "a.jsonl", "b.jsonl").dataset == ["a.jsonl", "b.jsonl"]
    assert parsed("--dataset", "a", "--eval-dataset", "a.jsonl").eval_dataset == ["a.jsonl"]
    assert DataArguments(dataset="a").dataset == ["a"]  # type: ignore[arg-type]
    for text in ("dataset: a\n", "dataset: [a]\n"):
        (tmp_path / "c.yaml").write_text(text)
        assert parsed("--config", str(tmp_path / "c.yaml")).dataset == ["a"]


def test_a_chat_template_from_a_file_and_what_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    flags = ["--dataset", "a", "--chat_template", str(tmp_path / "chat.jinja")]
    given = parsed(*flags, "--chat_template_kwargs", '{"enable_thinking": false}')
    assert given.template_text() == "{{ messages }}"
    assert given.template_kwargs() == {"enable_thinking": False}
    (tmp_path / "c.yaml").write_text(
        "dataset: a\nchat_template_kwargs:\n  enable_thinking: false\n"
    )
    assert parsed("--config", str(tmp_path / "c.yaml")).template_kwargs() == {
        "enable_thinking": False
    }
    assert DataArguments().template_text() is None and DataArguments().template_kwargs() == {}


@pytest.mark.parametrize("text", [None, "dataset: []\n"])
def test_a_corpus_must_be_named(text: str | None, tmp_path: Path) -> None:
    flags = []
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
        flags = ["--config", str(tmp_path / "c.yaml")]
    with pytest.raises(
        ValueError, match=r"--dataset is missing: .* a hub id, a folder .* 'stdlib'"
    ):
        parsed(*flags)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"eval_rows": 0}, "eval_rows must be at least 1, got 0"),
        ({"shuffle_buffer": 0}, "shuffle_buffer must be at least 1, got 0"),
        ({"dataset_num_proc": 0}, "dataset_num_proc must be at least 1, got 0"),
        ({"eval_share": 1.0}, "eval_share must lie between 0 and 1"),
        ({"eval_dataset": []}, "eval_dataset must name at least one corpus"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be 'error' or 'skip', got 'ignore'"),
        ({"streaming": True, "dataset_num_proc": 2}, "leave dataset_num_proc out"),
        ({"chat_template": "missing.jinja"}, "Jinja template at 'missing.jinja'"),
        ({"chat_template": "a\0b"}, r"Jinja template at 'a\\x00b'"),
        ({"chat_template_kwargs": "{"}, "must be a JSON object"),
        ({"chat_template_kwargs": "[1]"}, "must map names to values"),
    ],
)
def test_values_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(**values)
