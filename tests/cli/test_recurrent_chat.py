"""Conversations with targets whose state cannot go back to where a text begins to differ, and with
those whose tokenizer takes the end of an answer for a word."""

from __future__ import annotations

from typing import Any

import pytest

from medusa_heads import HeadsConfig, MedusaHeads, MedusaModel, TrainingFreeModel
from medusa_heads.cli.conversation import Conversation
from medusa_heads.cli.streaming import StepStreamer
from tests.conftest import TinyLlama
from tests.inference.recurrent import tiny_target
from tests.inference.speaking import FORGETFUL, TEMPLATE, make_speaker, make_tokenizer


@pytest.mark.filterwarnings("ignore:.*verifies a chain of drafts, not a tree")
@pytest.mark.parametrize(
    ("kind", "template", "keeps"),
    [
        ("lfm2", TEMPLATE, True),
        ("lfm2", FORGETFUL, False),
        pytest.param("jamba", TEMPLATE, True, marks=pytest.mark.slow),
        # Without attention nothing says how much was read.
        pytest.param("mamba", TEMPLATE, False, marks=pytest.mark.slow),
    ],
)
def test_a_state_serves_the_next_turn_where_that_goes_on_from_it(
    kind: str, template: str, keeps: bool
) -> None:
    target, tokenizer = tiny_target(kind), make_tokenizer(template)
    heads = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    options["bad_words_ids"] = [[token] for token in range(90, target.vocab_size)]
    said = []
    for forgets in (False, True):
        conversation = Conversation(MedusaModel(target, heads, tree=4), tokenizer)
        for turn in ("hello there", "and then?", "bye"):
            if forgets:
                conversation._cache = None
            conversation.ask(turn, StepStreamer(tokenizer, skip_prompt=True), options)
        assert (conversation.cached_tokens > 0) is (keeps and not forgets)
        said.append(conversation.messages)
    assert said[0] == said[1]


def test_the_end_token_is_no_part_of_what_was_said(
    tiny_llama: TinyLlama, capsys: pytest.CaptureFixture[str]
) -> None:
    """As tokenizers of fine-tuned models take `<|im_end|>`: a template writes it itself."""
    tokenizer = make_tokenizer()
    target = make_speaker(tiny_llama, tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}

    def answer() -> str:
        conversation = Conversation(TrainingFreeModel(target, "recycling"), tokenizer)
        conversation.ask("hello", StepStreamer(tokenizer, skip_prompt=True), options)
        said = conversation.messages[-1]["content"]
        assert capsys.readouterr().out == said + "\n"
        return said

    whole = answer()
    target.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(whole[-1])
    assert answer() == whole.partition(whole[-1])[0]
