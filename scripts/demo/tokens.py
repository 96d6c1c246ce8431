"""A tokenizer learnt from sources, and their tokens in rows of one length."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
# A line break keeps the indentation after it, a word the space before it; digits stay single.
WORDS = r"\n[ \t]*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens never run across a line break or a word's start."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=END
    )


def to_blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Dataset:
    """Documents, each ended by the end token, laid end to end and cut into rows of `length` tokens.

    Returns columns `input_ids` and `labels`, equal: the model shifts the labels itself.
    """

    def lay(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream = [
            token
            for ids in tokenizer(batch["text"], verbose=False)["input_ids"]
            for token in [*ids, tokenizer.eos_token_id]
        ]
        rows = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    documents = Dataset.from_dict({"text": texts})
    blocks = documents.map(
        lay, batched=True, batch_size=256, remove_columns=["text"], desc="Tokenizing"
    )
    if blocks.num_rows == 0:
        raise ValueError(f"The texts hold no {length} tokens: give more files or a shorter length.")
    return blocks
