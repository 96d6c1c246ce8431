"""Drafts of a model with another vocabulary behind a text that is encoded anew for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteriaList

from medusa_heads import TargetModel
from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.model.draft_model import DraftModelDrafter
from medusa_heads.inference.drafters.model.drafted_text import DraftedText
from medusa_heads.inference.drafters.model.translated_row import TranslatedRow
from medusa_heads.inference.drafters.model.vocabulary import ForeignDraft, fitted
from medusa_heads.inference.engine.rows import Row, StopCheck
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.drafters.model.test_vocabulary import couple, letters
from tests.inference.planted import decoding


class Reread(Drafter):
    """Every proposal is held against the draft model without a cache, on the text as bytes."""

    def __init__(self, drafter: DraftModelDrafter, draft: ForeignDraft, mask_BT: Tensor) -> None:
        self.drafter, self.draft, self.mask_BT = drafter, draft, mask_BT
        self.num_nodes = drafter.num_nodes
        self.errors: list[float] = []

    def propose(self, state: DecodingState) -> TokenTree:
        tree, shared = self.drafter.propose(state), self.draft.vocabulary
        assert tree.log_probs_BN is not None
        for b, row in enumerate(state.rows):
            start = int((self.mask_BT[row.index] == 0).sum())
            read = TranslatedRow(row, start, shared)  # from its beginning
            for node in range(1, tree.num_nodes):
                path = tree.ancestors_BNN[b, node].nonzero().flatten().tolist()
                above_T = shared.drafted(tree.tokens_BN[b, path[1:-1]])
                ids_1T = torch.cat([torch.tensor(read.ids).to(above_T), above_T])[None]
                logits_V = self.draft.model(ids_1T, use_cache=False).logits[0, -1]
                log_probs_V = shared.of_target(logits_V).log_softmax(-1)
                expected = log_probs_V[tree.tokens_BN[b, node]]
                self.errors.append(float((tree.log_probs_BN[b, node] - expected).abs()))
        return tree


PAIRS = [one + other for one in "abcd" for other in "abcd"]


@pytest.fixture(scope="module")
def spellers(tiny_llama: TinyLlama) -> tuple[Any, Any]:
    """A target that writes pairs of letters. Its draft model has half of them, and reads the others
    as one or three letters, as it falls out: what a text ends in changes as it grows."""
    theirs = letters(*PAIRS)
    pieces = [*"abcd", *PAIRS[::2], "abc", "bbb", "dab", "bcb", "cbd", "bda"]
    unigram = Tokenizer(models.Unigram([("?", -99.0), *((each, -1.0) for each in pieces)], 0))
    own = PreTrainedTokenizerFast(tokenizer_object=unigram)
    target, made = couple(theirs, own, tiny_llama)
    draft = fitted(TargetModel(made), TargetModel(target), own, theirs)
    return target, draft


def reread(spellers: Any, shape: dict[str, Any], batch: int) -> float:
    target, draft = spellers
    ids_BT = torch.randint(len(PAIRS), (batch, 11), generator=torch.Generator().manual_seed(1))
    mask_BT = (torch.arange(11) >= 3 * torch.arange(batch)[:, None]).long().to(DEVICE)
    size = len(target.lm_head.weight)
    checked = Reread(DraftModelDrafter(draft, size, **shape), draft, mask_BT)
    # Drafts that know what is drawn say of a token how likely that makes it.
    custom = decoding(TargetModel(target), checked, rng="transformers")
    torch.manual_seed(1)
    target.generate(
        ids_BT.to(DEVICE),
        attention_mask=mask_BT,
        custom_generate=custom,
        do_sample=True,
        top_k=0,
        max_new_tokens=30,
    )
    return max(checked.errors)


SHAPES = [{"depth": 3}, {"depth": 3, "width": 3, "num_drafted": 9}]


@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        # Each shape and each size of a batch has a quick one.
        pytest.param(shape, batch, marks=[] if i != j else [pytest.mark.slow])
        for i, shape in enumerate(SHAPES)
        for j, batch in enumerate((1, 3))
    ],
)
def test_drafts_follow_a_text_that_is_encoded_anew(
    spellers: Any, shape: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    read_on = TranslatedRow.read_on

    def watched(row: TranslatedRow) -> int:
        before = row.ids
        same = read_on(row)
        changed.append(row.ids[: len(before)] != before)
        return same

    monkeypatch.setattr(TranslatedRow, "read_on", watched)
    assert reread(spellers, shape, batch) < 1e-3
    assert sum(changed) > 1


def test_a_translation_is_read_where_the_draft_model_lies(
    spellers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made on the host."""
    _, draft = spellers
    model, read = copy.deepcopy(draft.model).to("meta"), []
    elsewhere = ForeignDraft(TargetModel(model), draft.vocabulary)
    monkeypatch.setattr(elsewhere, "hidden", lambda ids_BT, *_, **__: read.append(ids_BT.device))
    row = Row(0, 1, torch.arange(5), StopCheck(StoppingCriteriaList()))
    DraftedText(elsewhere, [row], [0])
    assert read == [torch.device("meta")]


def test_a_text_that_is_not_rolled_back_is_caught(
    spellers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what was read once is trusted, though it is encoded otherwise by now."""
    read_on = TranslatedRow.read_on

    def trusting(row: TranslatedRow) -> int:
        before = row.padding + len(row.ids)
        read_on(row)
        return min(before, row.length - 1)

    monkeypatch.setattr(TranslatedRow, "read_on", trusting)
    assert reread(spellers, SHAPES[0], 1) > 0.02


# The law, over a vocabulary of eight tokens of which the draft model has six, at other places.
