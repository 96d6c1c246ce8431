"""Draft models with another vocabulary: what is shared, what they read, and the target's law."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from medusa_heads import DraftedModel, TargetModel
from medusa_heads.inference.drafters.model import draft_model
from medusa_heads.inference.drafters.model.vocabulary import ForeignDraft, SharedVocabulary
from medusa_heads.inference.drafters.model.walk import draw_different
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.model import test_sampled_drafts as law
from tests.inference.reference import reference
from tests.pairs import with_slow

TEXT = "the cat sat on the mat; the hat, the bat and the rat sat there too: what a chat, d\u00e9"
NEW = 28


def byte_level(size: int, text: str, end: str, alphabet: int) -> PreTrainedTokenizerFast:
    """Byte pairs of this text, above so many of the 256 bytes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    known = sorted(pre_tokenizers.ByteLevel.alphabet())[:alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end], initial_alphabet=known, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end)


def letters(*pieces: str) -> PreTrainedTokenizerFast:
    """Each of these is a token."""
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def resembling(target: Any, made: Any, vocabulary: SharedVocabulary, noise: float) -> Any:
    """A model that knows what the target knows of the tokens that both have."""
    rows = torch.tensor(list(vocabulary.own.items()), device=DEVICE).T
    weights, generator = target.state_dict(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.to(DEVICE).named_parameters():
            if weights[name].shape == parameter.shape:
                parameter.copy_(weights[name])
            else:
                parameter[rows[1]] = weights[name][rows[0]]
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator).to(DEVICE))
    return made


def couple(theirs: Any, own: Any, tiny_llama: TinyLlama) -> tuple[Any, Any]:
    """A target whose next token depends on the last one most, so that a draft model which reads the
    text in other tokens can be right; and such a draft model."""
    target = tiny_llama(vocab_size=len(theirs) + 5).to(DEVICE)  # a padded vocabulary matrix
    target.generation_config.pad_token_id = 0
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    vocabulary = SharedVocabulary(own, theirs, len(own), len(theirs) + 5, target.device)
    return target, resembling(target, tiny_llama(vocab_size=len(own)), vocabulary, 0.002)


@pytest.fixture(scope="module")
def tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """The target's and the draft model's, which learnt from less and has not all bytes."""
    return byte_level(300, TEXT, "<end>", 256), byte_level(230, TEXT[30:], "</s>", 200)


@pytest.fixture(scope="module")
def pair(tokenizers: Any, tiny_llama: TinyLlama) -> tuple[Any, Any]:
    theirs, own = tokenizers
    return couple(theirs, own, tiny_llama)


def inputs(tokenizer: Any, batch: int) -> dict[str, Any]:
    text = "the cat \u6f22\u5b57 sat on \u00e9 and d\u00e9j\u00e0 ate"
    ids_BT = tokenizer(text, return_tensors="pt")["input_ids"].repeat(batch, 1).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    for row in range(batch):
        mask_BT[row, : row * 4] = 0
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


@pytest.mark.parametrize(
    "tree",
    [
        *("chain:3", "sampled:3x2x1"),
        *(
            pytest.param(tree, marks=pytest.mark.slow)
            for tree in ("dynamic:9", "sampled:3", "auto")
        ),
    ],
)
def test_equal_to_generate(tokenizers: Any, pair: Any, tree: str) -> None:
    """Greedy, in batches whose rows end at different places too; chosen drafts with the same
    seed."""
    own: Any = {"target_tokenizer": tokenizers[0], "draft_tokenizer": tokenizers[1]}
    model = DraftedModel(*pair, tree=tree, rng="transformers", **own)
    chosen = tree.startswith(("chain", "dynamic"))
    for batch, sampled in [(1, False), (3, False), *[(1, True)] * chosen]:
        options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": NEW, "eos_token_id": 7}
        options |= {"temperature": 0.4, "top_k": 0} if sampled else {}
        texts: list[Any] = []
        for decode in (partial(reference, pair[0]), model.generate):
            torch.manual_seed(3)
            texts.append(decode(**inputs(tokenizers[0], batch), **options))
        assert torch.equal(*texts), (batch, sampled)
        assert tree == "auto" or model.last_stats.tokens_per_step > 1.1
    assert 0.6 < model.shared_vocabulary[0] < 0.9


@pytest.fixture(scope="module")
def small(tiny_llama: TinyLlama) -> tuple[Any, dict[float, ForeignDraft]]:
    target = tiny_llama(vocab_size=law.VOCAB, hidden_size=32).to(DEVICE)
    target.generation_config.pad_token_id = 0
    theirs, own = letters(*"abcdefgh"), letters(*"xhyfadbzq")
    made = tiny_llama(vocab_size=len(own), hidden_size=32)
    vocabulary = SharedVocabulary(own, theirs, len(own), law.VOCAB, target.device)
    assert sorted(vocabulary.own) == [0, 1, 3, 5, 7]
    drafts = {}
    for noise in (0.02, 0.2):
        knowing = resembling(target, made, vocabulary, noise)
        drafts[noise] = ForeignDraft(TargetModel(knowing), vocabulary)
        made = tiny_llama(vocab_size=len(own), hidden_size=32)
    return target, drafts


def p_value(
    small: Any, noise: float, tree: str, samples: int, new: int = 3, **options: Any
) -> tuple[float, float]:
    options = {"temperature": 1.0, "top_k": 0} | options
    return law.p_value(small[0], small[1][noise], tree, options, samples, new=new)


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ("sampled:3", {}),
        pytest.param("sampled:3x2", {"top_k": 3}, marks=pytest.mark.slow),
        pytest.param("sampled:3", {"repetition_penalty": 1.6}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drawn_text_follows_the_target(small: Any, tree: str, options: dict[str, Any]) -> None:
    p, tokens_per_step = p_value(small, 0.2, tree, 1000, **options)
    assert p > 1e-4 and tokens_per_step > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["sampled:3", "sampled:3x2", "sampled:4x1"])
@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_drawn_text_follows_the_target_closely(small: Any, noise: float, tree: str) -> None:
    p, tokens_per_step = p_value(small, noise, tree, 10_000, new=5)
    assert p > 1e-4 and tokens_per_step > 1.1


def unmapped(probs_BFV: Tensor, count: int) -> Tensor:
    """Wrong: the draft model's own ids, as if they were the target's."""
    own_V = torch.tensor([4, 6, 2, 5, 0, 3, 7, 1], device=probs_BFV.device)
    return own_V[draw_different(probs_BFV, count)]


def not_renormalised(probs_BFV: Tensor, count: int) -> Tensor:
    """Wrong: what is not shared is drawn as well, and taken for the first token."""
    tokens_BFR = draw_different(probs_BFV, count)
    return tokens_BFR * (torch.rand(tokens_BFR.shape, device=tokens_BFR.device) < 0.6)


@pytest.mark.parametrize("wrong", with_slow([unmapped], [not_renormalised]))
def test_wrong_draws_are_caught(small: Any, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the same test, the same drafts."""
    monkeypatch.setattr(draft_model, "draw_different", wrong)
    assert p_value(small, 0.2, "sampled:3", 500)[0] < 1e-6


def test_tokens_are_shared_by_their_bytes() -> None:
    """However a tokenizer writes spaces and bytes; special tokens by name, or by what they do."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0x61>",
        "\u2581the",
        "a",
        "\u2581\u2581",
        "\u00e9",
        "zz",
    ]
    unigram = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    own = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", bos_token="<s>")
    words = {
        "<end>": 0,
        "a": 1,
        "\u0120the": 2,
        "\u010a": 3,
        "\u0120\u0120": 4,
        "\u00c3\u00a9": 5,
        "q": 6,
    }
    bpe = Tokenizer(models.BPE(vocab=words, merges=[]))
    bpe.decoder = decoders.ByteLevel()
    theirs = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    shared = SharedVocabulary(own, theirs, len(own), len(theirs), torch.device("cpu"))
    assert shared.own == {0: 2, 1: 6, 2: 5, 3: 3, 4: 7, 5: 8}
    assert shared.share == pytest.approx(6 / 7)
    logits_V = shared.of_target(torch.arange(10.0))
    assert logits_V.tolist() == [2.0, 6.0, 5.0, 3.0, 7.0, 8.0, float("-inf")]
    assert shared.encode(b" the\nzz!") == [5, 3, 9]  # nothing stands for the last byte


def test_tokenizers_are_found_beside_their_models(
    tokenizers: Any, pair: Any, tmp_path: Path
) -> None:
    for model, tokenizer, name in zip(pair, tokenizers, ("target", "draft"), strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    target = TargetModel.from_pretrained(str(tmp_path / "target"), dtype="float32")
    model = DraftedModel.from_pretrained(tmp_path / "draft", target=target, tree="chain:3")
    given = inputs(tokenizers[0], 1)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    plain: Any = target.model
    expected_BT = plain.generate(**given, **settings)
    got_BT: Any = model.generate(**given, **settings)
    assert torch.equal(got_BT, expected_BT) and model.last_stats.tokens_per_step > 1.1
    # Such draft models can be handed on, as a chat does when the tree is changed.
    again = DraftedModel(model.target, model.drafts, tree="chain:2")
    assert again.shared_vocabulary == model.shared_vocabulary < [1.0]
    for damage in ("{", '{"a": 1}', '{"version": "1.0", "model": 3}'):
        (tmp_path / "draft" / "tokenizer.json").write_text(damage)
        with pytest.raises(ValueError, match="no draft_tokenizer can be read"):
            DraftedModel.from_pretrained(tmp_path / "draft", target=target)
    shutil.rmtree(tmp_path / "draft")


def test_vocabularies_that_cannot_be_compared_are_refused(tokenizers: Any, pair: Any) -> None:
    theirs, own = tokenizers
    foreign = letters(*map(chr, range(0x4E00, 0x4F00)))
    for given, sentence in [
        ({}, "a vocabulary of 227 tokens, the target one of \\d+, and no draft_tokenizer can be"),
        ({"draft_tokenizer": own}, "no target_tokenizer can be read .*: pass target_tokenizer="),
        ({"draft_tokenizer": "gpt2"}, "draft_tokenizer must be a tokenizer, got str"),
        ({"draft_tokenizer": [own, own]}, "for each of 1 draft models, got 2"),
        ({"draft_tokenizer": foreign, "target_tokenizer": theirs}, "share 0 tokens, too few"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            DraftedModel(*pair, **given)
