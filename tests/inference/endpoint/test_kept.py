"""Conversations whose earlier turns the target has read already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from medusa_heads.inference.endpoint.server import Server
from tests.inference.endpoint.asking import ask, metrics


@pytest.mark.parametrize("kept_bytes", [0, 10**6])
def test_the_next_turn_begins_where_the_last_one_ended(
    kept_bytes: int, endless: Any, tokenizer: Any
) -> None:
    said: list[dict[str, str]] = []
    with Server(endless, tokenizer, port=0, kept_bytes=kept_bytes) as server:
        for turn in range(3):
            said.append({"role": "user", "content": f"{turn} and what then is next"})
            body = {"messages": said, "max_tokens": 12, "temperature": 0}
            status, answer = ask(server, "/v1/chat/completions", body)
            assert status == 200
            written = answer["choices"][0]["message"]
            asked = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
            prompt, ids_1T = len(asked), torch.tensor([asked])
            text_1T = endless.generate(ids_1T, max_new_tokens=12, do_sample=False)
            assert written["content"] == tokenizer.decode(text_1T[0, prompt:])
            begun = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # All but what is new, and the last token written, which nobody has read.
            new = len(tokenizer(f"<end>u:{said[-1]['content']}a:")["input_ids"]) + 1
            assert begun == (prompt - new if kept_bytes and turn else 0)
            said.append(written)
        assert (int(metrics(server).partition("\nmedusa_heads_kept_bytes ")[2].split()[0]) > 0) == (
            kept_bytes > 0
        )
