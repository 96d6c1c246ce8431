"""The draft model's drafter: what it proposes, and that the target's text stays the target's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from medusa_heads.inference.drafters.base import Drafter
from medusa_heads.inference.drafters.model import drafted_text
from medusa_heads.inference.drafters.model.draft_model import DraftModelDrafter
from medusa_heads.inference.engine.state import DecodingState
from medusa_heads.inference.engine.stats import GenerationStats
from medusa_heads.target.target import TargetModel
from medusa_heads.trees.tree import TokenTree
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import decoding
from tests.inference.reference import reference

VOCAB = 199
PROMPT = 21
NEW = 32
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"depth": 4},
    "tree": {"depth": 3, "width": 3, "num_drafted": 12},
}


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Any:
    made = tiny_llama(num_layers=3)
    made.generation_config.pad_token_id = 0
    return made.to(DEVICE)


@pytest.fixture(scope="module")
def pruned(target: Any, tiny_llama: TinyLlama) -> TargetModel:
    """The target without its middle layer, whose output it so only resembles."""
    made = tiny_llama(num_layers=2)
    weights = target.state_dict()
    for name in made.state_dict():
        made.state_dict()[name].copy_(weights[name.replace("layers.1.", "layers.2.")])
    return TargetModel(made.to(DEVICE))


def prompts(batch: int) -> dict[str, Tensor]:
    """Random prompts, the second and later rows padded on the left."""
    ids_BT = torch.randint(1, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.ones_like(ids_BT)
    for row in range(batch):
        mask_BT[row, : (row * 5) % PROMPT] = 0
    return {"input_ids": (ids_BT * mask_BT).to(DEVICE), "attention_mask": mask_BT.to(DEVICE)}


def generate(
    target: Any, drafter: Any, inputs: dict[str, Tensor], **options: Any
) -> tuple[Tensor, GenerationStats]:
    stats = GenerationStats()
    custom = decoding(TargetModel(target), drafter, rng="transformers", stats=stats)
    torch.manual_seed(7)
    settings = {"max_new_tokens": NEW, **options}
    got_BT = target.generate(**inputs, custom_generate=custom, **settings)
    return got_BT, stats


def plain(target: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(7)
    return reference(target, **inputs, max_new_tokens=NEW, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.4, "top_k": 0},
    "ends": {"do_sample": False, "eos_token_id": list(range(3, 30))},
}


@pytest.fixture(scope="module")
def drafts(target: Any, pruned: TargetModel, tiny_llama: TinyLlama) -> dict[str, TargetModel]:
    """From the best conceivable one to one that knows nothing."""
    near = tiny_llama(num_layers=3).to(DEVICE)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in near.parameters():
            drawn = torch.randn(parameter.shape, generator=noise)
            parameter.add_(0.01 * drawn.to(DEVICE))
    stranger = tiny_llama(num_layers=1, seed=9, hidden_size=32).to(DEVICE)
    return {
        "itself": TargetModel(target),
        "near": TargetModel(near),
        "pruned": pruned,
        "stranger": TargetModel(stranger),
    }


@pytest.mark.parametrize(
    ("draft", "shape"),
    [
        # Each shape has a quick one, and so have drafts of which all, some or none are right.
        pytest.param(draft, SHAPES[name], marks=marks, id=f"{draft}-{name}")
        for i, draft in enumerate(("itself", "near", "pruned", "stranger"))
        for j, name in enumerate(SHAPES)
        for marks in [[] if (i + j) % 2 == 0 and i in (0, 3) else [pytest.mark.slow]]
    ],
)
def test_equal_to_generate(
    target: Any, drafts: dict[str, TargetModel], draft: str, shape: dict[str, Any]
) -> None:
    """Greedy, sampled with the same seed, and in batches whose rows end at different places."""
    drafter = DraftModelDrafter(drafts[draft], VOCAB, **shape)
    reached = {}
    for name, options in OPTIONS.items():
        for batch in (1,) if options["do_sample"] else (1, 4):
            inputs = prompts(batch)
            got_BT, stats = generate(target, drafter, inputs, **options)
            assert torch.equal(got_BT, plain(target, inputs, **options)), (name, batch)
            reached[name, batch] = stats
    greedy = reached["greedy", 4]
    if draft == "itself":
        # A prefill of each row drafts nothing, and behind its last token nothing is accepted.
        assert greedy.accepted[0] <= 2 * 4
        assert shape != SHAPES["chain"] or greedy.accepted[4] == greedy.steps - 2 * 4
    elif draft == "stranger":
        assert greedy.tokens_per_step < 1.1
    else:
        assert len(greedy.accepted) > 1  # a ragged batch
        assert draft != "near" or reached["sampled", 1].tokens_per_step > 1.3


class Checked(Drafter):
    """A drafter whose every proposal is held against the draft model without any cache."""

    def __init__(self, drafter: DraftModelDrafter, draft: TargetModel, prompt_mask: Tensor) -> None:
        self.drafter, self.draft, self.mask_BT = drafter, draft, prompt_mask
        self.num_nodes = drafter.num_nodes
        self.errors: list[float] = []

    def propose(self, state: DecodingState) -> TokenTree:
        tree = self.drafter.propose(state)
        assert tree.log_probs_BN is not None
        for b, row in enumerate(state.rows):
            text_T = row.ids_1T()[0, int((self.mask_BT[row.index] == 0).sum()) :]
            for node in range(1, tree.num_nodes):
                path = tree.ancestors_BNN[b, node].nonzero().flatten().tolist()
                above = tree.tokens_BN[b, path[1:-1]]
                ids_1T = torch.cat([text_T, above])[None]
                logits_V = self.draft.model(ids_1T, use_cache=False).logits[0, -1]
                log_probs_V = logits_V.log_softmax(-1)
                expected = log_probs_V[tree.tokens_BN[b, node]]
                self.errors.append(float((tree.log_probs_BN[b, node] - expected).abs()))
                if isinstance(self.drafter, DraftModelDrafter) and tree.num_nodes == 5:  # a chain
                    assert tree.tokens_BN[b, node] == logits_V.argmax()
        return tree


def checked_run(target: Any, draft: TargetModel, shape: dict[str, Any], batch: int) -> list[float]:
    inputs = prompts(batch)
    checked = Checked(DraftModelDrafter(draft, VOCAB, **shape), draft, inputs["attention_mask"])
    generate(target, checked, inputs, do_sample=False, max_new_tokens=12)
    return checked.errors


@pytest.mark.parametrize(
    ("window", "shape", "batch"),
    [
        # Each of the first two is in a quick one.
        pytest.param(window, SHAPES[name], batch, marks=marks, id=f"{window}-{name}-{batch}")
        for i, window in enumerate((None, 16))
        for j, name in enumerate(SHAPES)
        for k, batch in enumerate((1, 4))
        for marks in [[] if i == j and k else [pytest.mark.slow]]
    ],
)
def test_proposals_are_those_of_the_draft_model_without_a_cache(
    target: Any,
    drafts: dict[str, TargetModel],
    shape: dict[str, Any],
    batch: int,
    window: int | None,
) -> None:
    draft = drafts["near"]
    if window is not None:
        config = MistralConfig(**target.config.to_dict() | {"sliding_window": window})
        model = MistralForCausalLM(config).eval().to(DEVICE)
        model.load_state_dict(draft.model.state_dict())
        draft = TargetModel(model)
    assert max(checked_run(target, draft, shape, batch)) < 1e-3


def test_a_draft_that_is_not_rolled_back_is_caught(
    target: Any, drafts: dict[str, TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a cache that keeps the likeliest draft, whatever the target committed."""

    def trusting(tokens: list[int], parents: list[int], text: list[int]) -> list[int]:
        path: list[int] = []
        while len(path) < len(text) and (path[-1] if path else -1) in parents:
            path.append(parents.index(path[-1] if path else -1))
        return path

    monkeypatch.setattr(drafted_text, "_walk", trusting)
    assert max(checked_run(target, drafts["near"], SHAPES["tree"], 1)) > 0.1


def test_the_next_text_starts_afresh(target: Any, drafts: dict[str, TargetModel]) -> None:
    drafter = DraftModelDrafter(drafts["near"], VOCAB)
    for batch in (2, 1, 4):
        inputs = prompts(batch)
        got_BT, stats = generate(target, drafter, inputs, do_sample=False)
        assert torch.equal(got_BT, plain(target, inputs, do_sample=False))
        assert stats.tokens_per_step > 1.3


def test_a_shorter_context_of_the_draft_costs_acceptance_alone(
    target: Any, tiny_llama: TinyLlama
) -> None:
    short = TargetModel(tiny_llama(num_layers=1, max_position_embeddings=32).to(DEVICE))
    inputs = prompts(2)
    got_BT, _ = generate(target, DraftModelDrafter(short, VOCAB), inputs, do_sample=False)
    assert torch.equal(got_BT, plain(target, inputs, do_sample=False))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"depth": 0}, "at least 1 token deep"),
        ({"depth": 2, "width": 2, "num_drafted": 999}, "got 999"),
    ],
)
def test_impossible_shapes_are_refused(
    pruned: TargetModel, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        DraftModelDrafter(pruned, VOCAB, **settings)
