"""What engines that verify chains should count, against this package's own engine."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from medusa_heads.config import HeadsConfig
from medusa_heads.heads import BlockHeads, DraftHeads, MedusaHeads
from medusa_heads.inference.models.medusa import MedusaModel
from medusa_heads.inference.serving import chain
from medusa_heads.inference.serving.chain import check_chain, greedy, simulate_chain
from medusa_heads.target.target import TargetModel
from tests.conftest import TinyLlama

NEW_TOKENS = 18
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> TargetModel:
    made = TargetModel(tiny_llama())
    made.freeze()
    return made


@pytest.fixture(scope="module", params=[None, 8], ids=["plain", "corrected"])
def heads(target: TargetModel, request: pytest.FixtureRequest) -> DraftHeads:
    """Four heads that have learnt some of the target's own text."""
    torch.manual_seed(0)
    config = HeadsConfig(num_heads=4, correction_rank=request.param)
    made = MedusaHeads.from_target(target, config)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    texts = [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for _ in range(12):
        loss = torch.zeros(())
        for tokens_T in texts:
            before_TK = F.pad(tokens_T, (0, 4)).unfold(0, 4, 1)[1:]
            logits_TKV = made(target.hidden(tokens_T[None])[0], before_TK)
            for i in range(4):
                due_T = tokens_T[2 + i :]
                loss = loss + F.cross_entropy(logits_TKV[: len(due_T), i], due_T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval().requires_grad_(False)


@pytest.fixture
def written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that goes on is written once for all its lengths, as a greedy one begins as a longer
    one does."""
    written: dict[tuple[int, ...], torch.Tensor] = {}

    def known(target: TargetModel, prompt: Sequence[int], new_tokens: int) -> torch.Tensor:
        if tuple(prompt) not in written:
            written[tuple(prompt)] = greedy(target, prompt, NEW_TOKENS + 4)
        assert new_tokens <= NEW_TOKENS + 4
        return written[tuple(prompt)][: len(prompt) + new_tokens]

    monkeypatch.setattr(chain, "greedy", known)


def plain(target: TargetModel, prompt: list[int], **settings: Any) -> list[int]:
    model: Any = target.model
    output = model.generate(torch.tensor([prompt]), do_sample=False, **settings)
    return output[0, len(prompt) :].tolist()


def test_texts_are_the_targets_own(target: TargetModel, heads: DraftHeads) -> None:
    simulated = simulate_chain(target, heads, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert simulated.texts == [plain(target, p, max_new_tokens=NEW_TOKENS) for p in PROMPTS]


@pytest.mark.parametrize("draft_tokens", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_steps_are_those_of_our_own_engine(
    target: TargetModel, heads: DraftHeads, draft_tokens: int
) -> None:
    model = MedusaModel(target, heads, tree=f"chain:{draft_tokens}")
    for prompt in PROMPTS:
        simulated = simulate_chain(
            target, heads, [prompt], max_new_tokens=NEW_TOKENS, draft_tokens=draft_tokens
        )
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        assert model.last_stats is not None
        assert simulated.drafts == model.last_stats.steps - 1  # less the prompt's own
        assert simulated.draft_tokens == draft_tokens * simulated.drafts
        assert simulated.accepted == sum(simulated.accepted_per_position)
        # All tokens but the first come from chains, and the last chain may reach past the end.
        surplus = simulated.accepted + simulated.drafts - (NEW_TOKENS - 1)
        assert 0 <= surplus <= draft_tokens


def test_heads_of_this_test_are_right_sometimes(target: TargetModel, heads: DraftHeads) -> None:
    simulated = simulate_chain(target, heads, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert 0 < simulated.accepted < 0.9 * simulated.draft_tokens
    assert simulated.accepted_per_position[-1] > 0


@pytest.mark.usefixtures("written_once")
def test_texts_end_with_an_end_token_and_count_their_last_chain_in_full(
    target: TargetModel, heads: DraftHeads
) -> None:
    prompt = PROMPTS[0]
    full = simulate_chain(target, heads, [prompt], max_new_tokens=NEW_TOKENS)
    for place in range(1, 12):
        end = full.texts[0][place]
        length = full.texts[0].index(end) + 1
        ended = simulate_chain(target, heads, [prompt], max_new_tokens=NEW_TOKENS, end_tokens={end})
        limited = simulate_chain(target, heads, [prompt], max_new_tokens=length)
        assert ended == limited
        assert ended.texts == [full.texts[0][:length]]


@pytest.mark.usefixtures("written_once")
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_chains_may_end_with_the_text(
    target: TargetModel, heads: DraftHeads, draft_tokens: int
) -> None:
    """As llama.cpp's do: one token comes of every step, so that it is never drafted."""
    for length in range(1, NEW_TOKENS):
        simulated = simulate_chain(
            target,
            heads,
            PROMPTS[:1],
            max_new_tokens=length,
            draft_tokens=draft_tokens,
            past_end=False,
        )
        if length > 2:
            whole = simulate_chain(
                target, heads, PROMPTS[:1], max_new_tokens=length, draft_tokens=draft_tokens
            )
            assert simulated.texts == whole.texts
            assert whole.drafts - 1 <= simulated.drafts <= whole.drafts
            assert 0 <= simulated.draft_tokens <= whole.draft_tokens
            assert 0 <= whole.accepted - simulated.accepted <= draft_tokens
        # What was not accepted of them came one by one, the last one from a step without drafts.
        steps = length - 1 - simulated.accepted
        assert simulated.drafts in (steps, steps - 1)


def test_one_token_needs_no_chain(target: TargetModel, heads: DraftHeads) -> None:
    simulated = simulate_chain(target, heads, PROMPTS, max_new_tokens=1)
    assert [len(text) for text in simulated.texts] == [1, 1, 1]
    assert (simulated.drafts, simulated.draft_tokens, simulated.accepted) == (0, 0, 0)


def test_reduced_vocabulary_drafts_the_targets_ids(target: TargetModel) -> None:
    """Fresh heads with the whole vocabulary, and with all tokens that come up: equal counts."""
    tokens = sorted({t for prompt in PROMPTS for t in greedy(target, prompt, 50).tolist()})
    whole = MedusaHeads.from_target(target, HeadsConfig(num_heads=2))
    reduced = MedusaHeads.from_target(
        target, HeadsConfig(num_heads=2, draft_vocab_size=len(tokens)), torch.tensor(tokens)
    )
    expected = simulate_chain(target, whole, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert simulate_chain(target, reduced, PROMPTS, max_new_tokens=NEW_TOKENS) == expected


@pytest.mark.parametrize(
    ("settings", "draft_tokens", "message"),
    [
        ({"kind": "hydra"}, 4, "hydra heads see the tokens drafted before"),
        ({"prefix_attention": True}, 4, "without prefix_attention"),
        ({"features": [1]}, 4, "serve heads without features"),
        ({"kind": "block"}, 4, "attend over the text so far"),
        ({"num_heads": 3}, 4, "3 heads draft 1 to 3 tokens, not 4"),
        ({}, 0, "4 heads draft 1 to 4 tokens, not 0"),
    ],
)
def test_heads_that_draft_no_such_chain_are_refused(
    settings: dict[str, Any], draft_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_chain(HeadsConfig(**settings), draft_tokens)


def test_empty_prompts_are_refused(target: TargetModel, heads: DraftHeads) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        simulate_chain(target, heads, [[]], max_new_tokens=4)


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_block_drafts_no_more_than_it_has_queries_for(
    target: TargetModel, draft_tokens: int
) -> None:
    block = BlockHeads.from_target(target, HeadsConfig(kind="block", num_heads=3))
    with pytest.raises(ValueError, match=f"3 heads draft 1 to 3 tokens, not {draft_tokens}"):
        simulate_chain(target, block, PROMPTS, max_new_tokens=4, draft_tokens=draft_tokens)
