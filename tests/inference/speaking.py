"""Tiny targets that have words: a byte-level tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.conftest import TinyLlama

END = "<end>"
# Earlier turns stay as they were said.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '" + END + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Earlier answers are cut to three characters, as templates cut thoughts.
FORGETFUL = TEMPLATE.replace(
    "m['content'] }}", "(m['content'][:3] if m['role'][0] == 'a' else m['content']) }}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, and one that ends an answer."""
    pieces = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    made.chat_template = template
    return made


def make_speaker(tiny_llama: TinyLlama, tokenizer: PreTrainedTokenizerFast) -> Any:
    """A model over that tokenizer's tokens, which ends some of its answers."""
    model = tiny_llama(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def save_speaker(folder: Path, tiny_llama: TinyLlama, template: str | None = TEMPLATE) -> Path:
    """Both of them, where from_pretrained finds them."""
    tokenizer = make_tokenizer(template)
    make_speaker(tiny_llama, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
