"""The one row that is shown: what is learnt is green."""

import io
from typing import Any

from datasets import Dataset
from rich.console import Console

from medusa_heads.training.data.sample import show_sample
from tests.training import templates


def shown(rows: Any, tokenizer: Any, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=80, force_terminal=color, color_system="standard" if color else None
    )
    show_sample(rows, tokenizer, console)
    return stream.getvalue()


def test_the_prompt_is_dim_and_the_answer_green() -> None:
    tokenizer = templates.chat_tokenizer()
    prompt, answer = tokenizer("x = [1]")["input_ids"], tokenizer(" + [2]")["input_ids"]
    rows = Dataset.from_list(
        [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}]
    )
    text = shown(rows, tokenizer)
    assert "x = [1] + [2]" in text, "brackets are text, not markup"
    assert f"{len(answer)} of {len(prompt + answer)} tokens are learnt" in text
    colored = shown(rows, tokenizer, color=True)
    assert "\x1b[2mx = [1]\x1b[0m\x1b[32m + [2]\x1b[0m" in colored


def test_packed_documents_are_apart_and_a_stream_is_read_for_one_row() -> None:
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}

    def endless() -> Any:
        while True:
            yield row

    lines = [line.strip("│ \n") for line in shown(endless(), None).splitlines()]
    assert lines[1:4] == ["1 2", "----", "3 4"]


def test_a_long_row_is_shown_where_it_is_learnt() -> None:
    ids = list(range(1000))
    rows = [{"input_ids": ids, "labels": [-100] * 700 + ids[700:]}]
    text = shown(rows, None)
    assert "... 600 601 602" in text and "898 899  ..." in text and " 900 " not in text
