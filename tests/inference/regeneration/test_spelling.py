"""Texts of a server become the tokens that a model writes behind its prompt, whatever the tokenizer
does with the first word that it is given."""

from __future__ import annotations

import string
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from medusa_heads.inference.regeneration.prompts import Prompt
from medusa_heads.inference.regeneration.replies import spelling

MERGES = [("\u2581", "H"), ("\u2581H", "i"), ("\u2581", "w"), ("o", "k"), ("\u2581", "\u2581")]


def of_llama(spaces: str) -> Any:
    """A tokenizer that writes spaces as SentencePiece does, and puts one before the first word and
    behind each special token ("all", Llama 2's), before the first word ("first"), or none."""
    pieces = [*dict.fromkeys(["<unk>", "<s>", "</s>", *string.printable[:-5], "\u2581", "\n"])]
    pieces += ["".join(pair) for pair in MERGES]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", fuse_unk=True))
    if spaces == "all":
        marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(marks)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
    back = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(back)
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocab["<s>"])])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize("asked", ["Hi", "[I] Hi [/I]", "Hi\n"])
@pytest.mark.parametrize("spaces", ["all", "first", "never"])
def test_no_space_is_put_before_an_answer(spaces: str, asked: str) -> None:
    tokenizer = of_llama(spaces)
    prompt = Prompt(tokenizer(asked)["input_ids"], greedy=True)
    answers = {
        " wok": ["\u2581w", "ok"],
        "wok": ["w", "ok"],
        " wok\nHi wok": ["\u2581w", "ok", "\n", "H", "i", "\u2581w", "ok"],
    }
    for text, pieces in answers.items():
        tokens = spelling(tokenizer, prompt, text)
        assert tokens is not None and tokenizer.convert_ids_to_tokens(tokens) == pieces
