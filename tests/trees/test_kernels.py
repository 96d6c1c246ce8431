"""Trees by kernels for GPUs are torch's: interpreted on a CPU, else on the tests' device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.errors import MedusaWarning
from medusa_heads.trees import kernels, levels
from medusa_heads.trees.dynamic_tree import Tail, best_first_tree, likeliest
from medusa_heads.trees.levels import NEVER, SUREST, Level
from tests.conftest import DEVICE
from tests.elsewhere import compiled_elsewhere
from tests.pairs import alternately, meeting

pytest.importorskip("triton", reason="Triton is made for Linux alone")

B, BAD = 3, (-torch.inf, torch.nan)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda device: True)


def offers(paths: int, ranks: int, length: int, distinct: bool = False) -> Any:
    """Of random chances: scores of paths, tokens and log-probabilities behind them, the paths."""
    random = torch.Generator().manual_seed(paths * ranks)
    scores_BF = -3 * torch.rand(B, paths, generator=random)
    tokens_BFR = torch.randint(9, (B, paths, ranks), generator=random)
    if distinct:
        tokens_BFR = torch.rand(B, paths, ranks, generator=random).argsort(dim=-1)
    log_probs_BFR = (torch.rand(B, paths, ranks, generator=random) / ranks).log()
    paths_BFJ = torch.randint(99, (B, paths, length), generator=random)
    return tuple(each.to(DEVICE) for each in (scores_BF, tokens_BFR, log_probs_BFR, paths_BFJ))


def assert_same(made: Any, expected: Any, atol: float = 1e-5) -> None:
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize(("paths", "ranks", "kept"), [(1, 7, 7), (3, 5, 11), (10, 40, 63)])
def test_a_level_keeps_the_likeliest(paths: int, ranks: int, kept: int, merges: bool) -> None:
    given: Any = (*offers(paths, ranks, 2, distinct=not merges), kept, 4, merges)
    made = Level(*kernels.grown_level(*given, SUREST, NEVER))
    expected = levels.grown_level(*given)
    # What is offered twice counts once, and is as unlikely wherever it stands.
    there_BK = expected.scores_BK > NEVER
    torch.testing.assert_close(made.scores_BK, expected.scores_BK, rtol=1e-6, atol=1e-5)
    assert torch.equal(made.tokens_BK[there_BK], expected.tokens_BK[there_BK])
    assert torch.equal(made.above_BK[there_BK], expected.above_BK[there_BK])
    assert torch.equal(made.paths_BAJ, expected.paths_BAJ)


def test_the_scores_of_some_of_the_paths_above() -> None:
    """As the likeliest ones of a level, which lie in rows of all of them."""
    scores_BF, *others = offers(5, 7, 2)
    given: Any = (*others, 9, 4, True)
    wide_BK = torch.cat([scores_BF, scores_BF - 9], dim=1)
    for scores in (wide_BK[:, :5], wide_BK.mT.contiguous().mT[:, :5]):
        made = kernels.grown_level(scores, *given, SUREST, NEVER)
        assert_same(made, kernels.grown_level(scores_BF, *given, SUREST, NEVER), atol=0)


@pytest.mark.parametrize("merges", [False, True])
def test_a_level_of_what_is_no_number(merges: bool) -> None:
    scores, tokens, log_probs, paths = offers(3, 5, 1, distinct=True)
    log_probs[0, 0] = float("nan")
    log_probs[1, :, 1] = float("-inf")
    log_probs[2] = NEVER
    given = scores, tokens, log_probs, paths
    made = Level(*kernels.grown_level(*given, 15, 0, merges, SUREST, NEVER))
    expected = levels.grown_level(*given, 15, 0, merges)
    torch.testing.assert_close(made.scores_BK, expected.scores_BK, rtol=1e-6, atol=1e-5)
    for row in range(B):  # each offer once
        found = zip(made.above_BK[row].tolist(), made.tokens_BK[row].tolist(), strict=True)
        assert len(set(found)) == 15


def chances(small: bool) -> Any:
    random = torch.Generator().manual_seed(5)
    log_probs_VR = torch.randn(9, 6, generator=random).log_softmax(dim=-1).to(DEVICE)
    tokens_VR = torch.rand(9, 6, generator=random).argsort(dim=-1).to(DEVICE)
    tail = torch.tensor([[1, 2, 3] + [4] * 20] * B, device=DEVICE)
    told = torch.full(tail.shape, NEVER if small else -0.01, device=DEVICE)

    def guess(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        before_BF = paths_BFJ[..., -1]
        own_BF1 = tail[:, level, None, None].expand(-1, before_BF.shape[1], 1)
        tokens_BFR = torch.cat([own_BF1, tokens_VR[before_BF]], dim=-1)
        logs_BFR = log_probs_VR[before_BF]
        return tokens_BFR, torch.cat([torch.full_like(logs_BFR[..., :1], -0.5), logs_BFR], dim=-1)

    return guess, Tail(tail, told)


@pytest.mark.parametrize(("nodes", "small"), alternately((1, 7, 23), (False, True)))
def test_a_tree_is_the_one_that_torch_makes(
    small: bool, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess, tail = chances(small)
    own = Tail(*(each[:, : max(nodes, 3)] for each in tail))
    roots_B = torch.tensor([0, 4, 8], device=DEVICE)
    trees, smaller = [], []
    for serves in (False, True):
        monkeypatch.setattr(kernels, "serve", lambda device, serves=serves: serves)
        tree = best_first_tree(roots_B, guess, nodes, 3, 10, own, merges=True)
        assert tree.ranked is not None
        trees.append(
            (tree.tokens_BN, tree.parents_BN, tree.depth_BN, tree.ancestors_BNN, *tree.ranked)
        )
        few, expected_BN = likeliest(tree, nodes // 2 + 1)
        smaller.append(
            (few.tokens_BN, few.parents_BN, few.depth_BN, few.ancestors_BNN, expected_BN)
        )
    assert_same(trees[1], trees[0])
    assert_same(smaller[1], smaller[0])


@pytest.mark.parametrize(
    ("first", "later", "nodes"),
    meeting((0.0, -60.0, *BAD), (0.0, -1.0, *BAD), (3, 15, 40, 63)),
)
@pytest.mark.usefixtures("served")
def test_no_node_stands_without_its_parent(first: float, later: float, nodes: int) -> None:
    tokens_R = torch.arange(16, device=DEVICE)

    def guess(level: int, paths_BFJ: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*paths_BFJ.shape[:2], 16)
        return tokens_R.expand(shape), torch.full(shape, later if level else first, device=DEVICE)

    tree = best_first_tree(torch.tensor([7], device=DEVICE), guess, nodes, 5, 10)
    parents_N, depth_N = tree.parents_BN[0, 1:], tree.depth_BN[0]
    assert torch.all(parents_N < torch.arange(1, nodes + 1, device=DEVICE))
    assert torch.equal(depth_N[1:], depth_N[parents_N] + 1)
    assert torch.equal(tree.ancestors_BNN[0].sum(dim=1), depth_N + 1)


@pytest.mark.parametrize(
    ("size", "dtype"),
    alternately([(1024, 8), (2049, 16), (5000, 3)], [torch.float32, torch.bfloat16]),
)
@pytest.mark.usefixtures("served")
def test_the_largest_are_those_of_topk(size: tuple[int, int], dtype: torch.dtype) -> None:
    columns, count = size
    random = torch.Generator().manual_seed(columns)
    x = torch.rand(2, 3, columns, generator=random).argsort(dim=-1).to(DEVICE, dtype)
    values, ids = kernels.best(x, count)
    assert_same([values], [x.topk(count, dim=-1).values])
    assert torch.equal(x.gather(-1, ids), values)
    for own in ids.flatten(0, 1).tolist():  # also where some are equal, as numbers of 16 bits are
        assert len(set(own)) == count


@pytest.mark.usefixtures("served")
def test_the_largest_of_what_is_no_number() -> None:
    x = torch.full((3, 3000), -torch.inf, device=DEVICE)
    x[0, 2500], x[0, 7] = torch.nan, 1.0
    x[1, 2999] = -5.0
    values, ids = kernels.best(x, 5)
    assert ids[0, :2].tolist() == [2500, 7] and values[0, 0].isnan()
    assert ids[1, 0] == 2999 and values[1, 0] == -5.0 and values[1, 1] == -torch.inf
    for own in ids.tolist():
        assert len(set(own)) == 5 and max(own) < 3000


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_candidates_are_ranked_as_exactly_as_they_are_compared(dtype: torch.dtype) -> None:
    """Or several had one rank, and more than the nodes were written."""
    random = torch.Generator().manual_seed(7)
    scores_BC = -torch.rand(B, 50, generator=random).cumsum(dim=1).to(DEVICE, dtype)
    depth_C = torch.arange(50, device=DEVICE)
    given: Any = scores_BC, depth_C.expand(B, -1), (depth_C - 1).expand(B, -1)
    made = levels.Chosen(*kernels.chosen_nodes(*given, depth_C.expand(B, -1), 20, levels.DEEPER))
    assert made.ranks_BN.tolist() == made.tokens_BN.tolist() == [list(range(20))] * B
    assert torch.equal(made.path_scores_BN, scores_BC[:, :20])


def test_a_kernel_of_one_row_is_the_same_however_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would make another one, too late for a graph that is recorded."""
    from medusa_heads.trees import triton_kernels

    class Noted:
        def __getitem__(self, grid: object) -> Any:
            return lambda *given, **_: numbers.append([n for n in given if isinstance(n, int)])

    numbers: list[list[int]] = []
    monkeypatch.setattr(triton_kernels, "_choose_nodes", Noted())
    zeros_BC = torch.zeros(1, 5, dtype=torch.long)
    for step in (0, 5, 16):
        depth_BC = zeros_BC.as_strided((1, 5), (step, 1))
        triton_kernels.choose_nodes(zeros_BC.float(), zeros_BC, zeros_BC, depth_BC, 3, 0.1)
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize("dtype", [torch.half, pytest.param(torch.double, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("served")
def test_no_default_of_torch_tells_how_exact_they_are(dtype: torch.dtype) -> None:
    guess, _ = chances(small=False)
    roots_B = torch.tensor([0, 4, 8], device=DEVICE)
    x = 1 + torch.arange(5000, device=DEVICE).flip(0)[None] / 10000
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert kernels._agree(torch.device(DEVICE))
        assert kernels.best(x, 5)[1].tolist() == [[0, 1, 2, 3, 4]]
        tree = best_first_tree(roots_B, guess, 9, 3, 10)
    finally:
        torch.set_default_dtype(before)
    assert tree.ranked is not None and tree.ranked.scores_BN.dtype == torch.float
    expected = best_first_tree(roots_B, guess, 9, 3, 10)
    assert_same([tree.tokens_BN, *tree.ranked], [expected.tokens_BN, *(expected.ranked or ())])


def test_they_are_compared_on_whatever_device_is_the_default() -> None:
    with torch.device("meta"):
        assert kernels._agree(torch.device(DEVICE))


def test_kernels_serve_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 7)
    monkeypatch.setattr(kernels._tried, "_known", {})
    monkeypatch.setattr(kernels, "_agree", lambda device: torch.ops.medusa_heads.no_compiler)
    assert not kernels.serve(torch.device("cpu"))
    with pytest.warns(MedusaWarning, match="trees go on by torch's own kernels: .*no_compiler"):
        assert not kernels.serve(gpu)
    assert not kernels.serve(gpu)  # and does not ask again


def test_no_memory_says_nothing_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again, but not while a graph is recorded, into which the question would go."""
    gpu, memory = torch.device("cuda", 7), [False, True]

    def agree(_: torch.device) -> bool:
        if not memory.pop(0):
            raise torch.OutOfMemoryError("none left")
        return True

    monkeypatch.setattr(kernels._tried, "_known", {})
    monkeypatch.setattr(kernels, "_agree", agree)
    with pytest.warns(MedusaWarning, match="trees go on by torch's own kernels: none left"):
        assert not kernels.serve(gpu)
    monkeypatch.setattr("medusa_heads.machine.kernels.is_capturing", lambda: True)
    assert not kernels.serve(gpu) and memory
    monkeypatch.setattr("medusa_heads.machine.kernels.is_capturing", lambda: False)
    assert kernels.serve(gpu) and not memory
    assert kernels.serve(gpu)


def test_they_are_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._agree(torch.device(DEVICE))
    whole = kernels.largest
    monkeypatch.setattr(kernels, "largest", lambda x, count: [each + 1 for each in whole(x, count)])
    with pytest.raises(ArithmeticError, match="do not make the trees that torch makes"):
        kernels._agree(torch.device(DEVICE))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from medusa_heads.machine.kernels import FUSED
from medusa_heads.trees import triton_kernels, triton_largest

WHOLE = "tokens parents depths paths places jumps words above own longer ids own_tokens own_parents"
TYPES = dict.fromkeys((WHOLE + " own_depths own_ranks").split(), "*i64")
TYPES |= dict.fromkeys("F R J C N V P kept asked depth_b depth_c blocks scores_b".split(), "i32")
TYPES |= dict.fromkeys("surest never deeper".split(), "fp32") | {"ancestors": "*i1"}

def compiled(kernel, capability, sizes, **others):
    types = {**TYPES, **others}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    signature |= dict.fromkeys(sizes, "constexpr")
    places = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    made = ASTSource(kernel, signature, {places[name]: size for name, size in sizes.items()})
    compile(made, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8, **FUSED})

for capability in (80, 90):
    for f, r in ((1, 32), (16, 32), (64, 16)):
        for merges in (False, True):
            s = triton_kernels.at_once(f, r)
            sizes = {"MERGES": merges, "BLOCK_F": f, "BLOCK_R": r, "BLOCK_S": s, "BLOCK_C": f * r}
            compiled(triton_kernels._grow_level, capability, sizes)
    for c, n in ((512, 64), (64, 16), (1024, 2)):
        sizes = {"BLOCK_C": c, "BLOCK_N": n, "DOUBLINGS": 6}
        compiled(triton_kernels._choose_nodes, capability, sizes)
    for dtype in ("*bf16", "*fp32"):
        sizes, own = {"COUNT": 16, "BLOCK": 2048}, {"places": "*i32", "x": dtype, "values": dtype}
        compiled(triton_largest._largest_of_block, capability, sizes, **own)
        compiled(triton_largest._largest_of_all, capability, sizes, **own)
"""


@pytest.mark.slow
def test_they_compile_for_gpus_that_are_not_here() -> None:
    compiled_elsewhere(COMPILE)
