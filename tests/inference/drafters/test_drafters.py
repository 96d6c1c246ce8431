"""Drafters of every kind of heads: the trees they propose, and texts that stay the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads import MedusaModel, TargetModel
from medusa_heads.heads import DraftHeads
from medusa_heads.inference.drafters.head_trees import DynamicDrafter, SequentialDrafter
from medusa_heads.inference.plan.trees import make_drafter
from medusa_heads.trees.tree import TreeShape, cartesian_choices
from tests.conftest import DEVICE, TinyLlama
from tests.inference.planted import BUSHY
from tests.inference.reference import reference
from tests.inference.rereading import RereadingDrafter, random_heads, run
from tests.pairs import alternately

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa, prefix": {"num_layers": 2, "prefix_attention": True, "linear_shortcut": True},
    "medusa, own matrix, 50 tokens": {"vocab_matrix": "own", "draft_vocab_size": 50},
    "hydra": {"kind": "hydra", "num_layers": 2},
    "hydra, 50 tokens": {"kind": "hydra", "draft_vocab_size": 50},
    "hydra, prefix": {"kind": "hydra", "prefix_attention": True},
    "hydra, induction": {"kind": "hydra", "induction": True},
    "eagle3": {"kind": "eagle3"},
    "eagle3, features": {"kind": "eagle3", "features": [0, 1]},
    "eagle3, own matrix, 50 tokens": {
        "kind": "eagle3",
        "vocab_matrix": "own",
        "draft_vocab_size": 50,
    },
    "medusa, corrected": {"correction_rank": 8},
    "block": {"kind": "block"},
    "block, 2 layers, corrected, 50 tokens": {
        "kind": "block",
        "num_layers": 2,
        "correction_rank": 8,
        "draft_vocab_size": 50,
    },
    "medusa, prefix, corrected, 50 tokens": {
        "prefix_attention": True,
        "correction_rank": 8,
        "draft_vocab_size": 50,
    },
    "medusa, induction, corrected, 50 tokens": {
        "induction": True,
        "linear_shortcut": True,
        "correction_rank": 8,
        "draft_vocab_size": 50,
    },
    "medusa, features": {"features": [1, 0]},
    "hydra, prefix, features": {"kind": "hydra", "prefix_attention": True, "features": [0]},
}
MADE_OF_OTHERS = [kind for kind in KINDS if kind.count(",") > 1 or "corrected" in kind]
TREES = ("chain", "cartesian:3,2,1", "dynamic:9", "auto", "none")
READERS: dict[str, dict[str, Any]] = {
    "medusa, prefix": {"prefix_attention": True},
    "hydra, prefix": {"kind": "hydra", "prefix_attention": True},
    "medusa, induction": {"induction": True},
    "hydra, induction": {"kind": "hydra", "induction": True},
    "block": {"kind": "block"},
    "block, 2 layers": {"kind": "block", "num_layers": 2},
}
SEQUENTIAL: dict[str, dict[str, Any]] = {
    "hydra": {"kind": "hydra"},
    "hydra, corrected": {"kind": "hydra", "correction_rank": 8},
    "medusa, corrected": {"correction_rank": 8},
    "medusa, corrected, own matrix": {"correction_rank": 8, "vocab_matrix": "own"},
}


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Any:
    return tiny_llama().to(DEVICE)


@pytest.fixture(scope="module", params=KINDS)
def heads(request: pytest.FixtureRequest, target: Any) -> DraftHeads:
    torch.manual_seed(0)
    return random_heads(target, **KINDS[request.param])


def state_at(hidden_BD: Tensor, roots_B: Tensor) -> Any:
    """As much of a decoding state as drafters without a memory read."""
    return SimpleNamespace(hidden_BD=hidden_BD, roots_B=roots_B, noise=None, on_host=True)


def log_probs_after(heads: DraftHeads, hidden_D: Tensor, path: Sequence[int]) -> Tensor:
    """What the head behind a path says, by what all heads say of a text that begins so [V]."""
    tokens = [*path, *[0] * (heads.config.num_heads - len(path))]
    tokens_K = torch.tensor(tokens, device=hidden_D.device)
    return heads(hidden_D[None], tokens_K[None])[0, len(path) - 1].log_softmax(-1)


@pytest.mark.parametrize("kind", SEQUENTIAL)
@torch.no_grad()
def test_a_static_tree_of_sequential_heads_follows_each_path(target: Any, kind: str) -> None:
    heads = random_heads(target, **SEQUENTIAL[kind])
    assert heads.sequential
    shape = TreeShape.from_choices([*cartesian_choices([3, 2, 2]), (3,), (4,), (4, 5)])
    hidden_BD = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    roots_B = torch.tensor([17, 99], device=DEVICE)
    tree = SequentialDrafter(heads, shape, with_log_probs=True).propose(
        state_at(hidden_BD, roots_B)
    )
    plain = SequentialDrafter(heads, shape).propose(state_at(hidden_BD, roots_B))
    assert torch.equal(plain.tokens_BN, tree.tokens_BN)
    for b in range(2):
        for node, choice in enumerate(shape.choices, start=1):
            path = [int(roots_B[b])]
            for rank in choice:
                log_probs_V = log_probs_after(heads, hidden_BD[b], path)
                path.append(int(log_probs_V.topk(rank + 1).indices[-1]))
                log_prob = float(log_probs_V[path[-1]])
            assert int(tree.tokens_BN[b, node]) == path[-1]
            assert tree.log_probs_BN is not None
            assert float(tree.log_probs_BN[b, node]) == pytest.approx(log_prob, abs=1e-4)


@pytest.mark.parametrize("kind", SEQUENTIAL)
@torch.no_grad()
def test_a_dynamic_tree_of_sequential_heads_holds_the_likeliest_paths(
    target: Any, kind: str
) -> None:
    heads = random_heads(target, **SEQUENTIAL[kind], draft_vocab_size=9)
    hidden_1D = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    roots_1 = torch.tensor([17], device=DEVICE)
    tree = DynamicDrafter(heads, 8).propose(state_at(hidden_1D, roots_1))
    assert heads.draft_tokens is not None
    vocabulary = heads.draft_tokens.tolist()
    log_probs = cache(partial(log_probs_after, heads, hidden_1D[0]))
    scores = {}
    for depth in (1, 2, 3):
        for path in product(vocabulary, repeat=depth):
            said = (
                log_probs((17, *path[:level]))[vocabulary.index(token)]
                for level, token in enumerate(path)
            )
            scores[path] = float(sum(said))
    likeliest = sorted(scores, key=scores.__getitem__, reverse=True)[:8]
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(
        tree.parents_BN[0].tolist()[1:], tree.tokens_BN[0].tolist()[1:], strict=True
    ):
        paths.append((*paths[parent], token))
    assert sorted(paths[1:]) == sorted(likeliest)


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "tree"),
    [
        # Each kind has a quick one, and each tree some.
        pytest.param(kind, tree, marks=[] if i % len(TREES) == j else [pytest.mark.slow])
        for i, kind in enumerate(KINDS)
        for j, tree in enumerate(TREES)
    ],
    indirect=["heads"],
)
def test_text_is_the_targets_own(
    heads: DraftHeads, target: Any, tree: str, other: bool, request: pytest.FixtureRequest
) -> None:
    """Greedy or drawn, which changes from one kind of heads, and of trees, to the next."""
    kind: str = request.node.callspec.params["heads"]
    do_sample = ((list(KINDS).index(kind) + TREES.index(tree)) // 2 % 2 == 1) != other
    fixed: Any = {"deterministic": tree == "auto", "rng": "transformers"}
    model = MedusaModel(target, heads, tree=tree, **fixed)
    ids_BT = torch.randint(199, (1, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "pad_token_id": 0}
    torch.manual_seed(1)
    expected_BT = reference(target, input_ids=ids_BT, **options)
    torch.manual_seed(1)
    got_BT: Any = model.generate(ids_BT, **options)
    assert torch.equal(got_BT, expected_BT)


@pytest.mark.parametrize(
    ("heads", "tree"),
    alternately(KINDS, ["cartesian:3,2,1", "dynamic:9"], slow=MADE_OF_OTHERS),
    indirect=["heads"],
)
def test_rows_of_a_padded_batch_are_the_targets_own(
    heads: DraftHeads, target: Any, tree: str
) -> None:
    model = MedusaModel(target, heads, tree=tree)
    generator = torch.Generator().manual_seed(4)
    ids_BT = torch.randint(199, (4, 9), generator=generator).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    for row, padding in enumerate((0, 3, 5, 1)):
        mask_BT[row, :padding] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected_BT = reference(target, input_ids=ids_BT, attention_mask=mask_BT, **options)
    got_BT: Any = model.generate(ids_BT, attention_mask=mask_BT, **options)
    assert torch.equal(got_BT, expected_BT)


def test_a_tree_beyond_the_heads_is_refused(heads: DraftHeads) -> None:
    with pytest.raises(ValueError, match="only 3 heads"):
        make_drafter([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], heads, None)
    with pytest.raises(ValueError, match=r"asks for rank 199 of (199|50) tokens"):
        make_drafter([[199]], heads, None)
    with pytest.raises(ValueError, match="a dynamic tree here has 1 to"):
        DynamicDrafter(heads, 99999)
    with pytest.raises(ValueError, match="a tree has at most 1024 drafted nodes"):
        make_drafter("dynamic:99999", heads, None)


@pytest.mark.parametrize(("kind", "chunk"), alternately(READERS, [None, 4]))
def test_layers_over_the_text_read_on_as_if_from_the_start(
    target: Any, kind: str, chunk: int | None
) -> None:
    heads, view = random_heads(target, **READERS[kind]), TargetModel(target)
    generator = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(199, (3, 9), generator=generator).to(DEVICE)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    options: dict[str, Any] = {"attention_mask": mask_BT, "max_new_tokens": 40, "do_sample": False}
    expected_BT = reference(target, input_ids=ids_BT, **options, pad_token_id=0)
    references = expected_BT[:, 9:].tolist()
    # A token that ends one row early: rows leave the batch at different steps.
    options |= {"eos_token_id": references[2][11], "pad_token_id": 0}
    if chunk:
        options["prefill_chunk_size"] = chunk
    drafter = RereadingDrafter(heads, view, references, 199, BUSHY, 0.5)
    with torch.no_grad():
        got_BT = target.generate(ids_BT, **options, custom_generate=partial(run, view, drafter))
    options.pop("prefill_chunk_size", None)
    assert torch.equal(got_BT, reference(target, input_ids=ids_BT, **options))
    assert drafter.compared > 15


@pytest.mark.parametrize(
    ("kind", "tree", "compile"), [("hydra", "7", False), ("medusa", "auto", "steps")]
)
def test_the_default_type_of_torch_is_of_new_models_alone(
    tiny_llama: TinyLlama, kind: str, tree: str, compile: Any
) -> None:
    model: Any = tiny_llama(num_layers=1).to(DEVICE)
    given: Any = {"input_ids": torch.arange(12, device=DEVICE)[None] % 5 + 1}
    given |= {"max_new_tokens": 20, "do_sample": False}
    right = reference(model, **given)
    heads, before = random_heads(model, kind=kind), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        medusa = MedusaModel(model, heads, tree=tree, compile=compile, compile_backend="eager")
        with medusa.target.uncompiled() if compile else nullcontext():  # type: ignore[attr-defined]
            made: Any = medusa.generate(**given)
            assert torch.equal(made, right)
    finally:
        torch.set_default_dtype(before)
