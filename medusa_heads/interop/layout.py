"""What heads the tensors of a foreign checkpoint make, and their values.

Shapes: D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_heads.checkpoint.stored_heads import DRAFT_TOKENS, are_ascending, expected_shapes
from medusa_heads.config import HeadsConfig
from medusa_heads.interop.formats import Layout
from medusa_heads.interop.source import IDS, Source

_PARTS = {"linear.weight", "linear.bias", "res_connection.weight", "res_connection.bias"}
_OUT = {"weight", "bias"}


def heads_config(source: Source, layout: Layout, target_vocab: int | None) -> HeadsConfig:
    """The heads' shape, as their tensors have it, each compared with all others; `target_vocab`:
    rows of the target's lm_head, where it is known. What the configuration claims wrongly is added
    to the layout's notices. Raises ValueError: a tensor is missing, surplus or of another shape
    than the others imply."""
    num_heads, num_layers, own = _counts(layout)
    first = layout.names.get("0.0.linear.weight")
    if first is None:
        raise ValueError(
            f"{source.name!r} lacks 0.0.linear.weight of its heads: download them anew"
        )
    if len(source.shape(first)) != 2 or 0 in source.shape(first):
        raise ValueError(
            f"{source.name!r}: {first} has shape {list(source.shape(first))}, expected a matrix"
        )
    matrix = layout.names.get(f"0.{num_layers}.weight") if own else layout.matrix
    rows = None if matrix is None else next(iter(source.shape(matrix)), 0)
    drafted = None
    if layout.token_map is not None:
        shape = source.shape(layout.token_map)
        drafted = shape[0] if len(shape) == 1 else 0
        if rows == drafted:
            rows = None  # those of the reduced vocabulary
    claimed = layout.claims.get("vocab_size")
    vocab_size = rows or target_vocab or (claimed[1] if claimed else None)
    if vocab_size is None:
        raise ValueError(
            f"{source.name!r} does not say how large the vocabulary is that its heads share with "
            "their target: give the target"
        )
    config = HeadsConfig(
        kind=layout.kind,
        num_heads=num_heads,
        num_layers=num_layers,
        vocab_matrix="own" if own else "shared",
        draft_vocab_size=drafted,
        raw_embeddings=layout.raw_embeddings,
        hidden_size=source.shape(first)[0],
        vocab_size=vocab_size,
    )
    _compare(source, layout, config)
    _compare_claims(layout, config)
    return config


def read_heads(source: Source, layout: Layout, config: HeadsConfig) -> dict[str, Tensor]:
    """The heads' tensors under our names, each in the dtype it is stored in. Raises ValueError: a
    value is not finite, or the reduced vocabulary names tokens there are not."""
    tensors = {ours: source.read(theirs) for ours, theirs in layout.names.items()}
    for name, shape in expected_shapes(config).items():
        # Heads without biases are heads whose biases are zero.
        if name.endswith(".linear.bias") and name not in tensors:
            dtype = tensors[name.replace(".bias", ".weight")].dtype
            tensors[name] = torch.zeros(shape, dtype=dtype)
    if layout.token_map is not None:
        order = _ascending(source, layout.token_map, config)
        if config.vocab_matrix == "own":
            for i in range(config.num_heads):
                name = f"{i}.{config.num_layers}.weight"
                tensors[name] = tensors[name][order]
        tensors[DRAFT_TOKENS] = source.read(layout.token_map, expected=IDS)[order]
    return tensors


def shared_matrix(source: Source, layout: Layout, config: HeadsConfig) -> Tensor | None:
    """The vocabulary matrix that the heads share, where the source holds a copy: [V, D], of a
    reduced vocabulary its rows in ascending order of token ids."""
    if layout.matrix is None:
        return None
    matrix_VD = source.read(layout.matrix)
    if layout.token_map is None or len(matrix_VD) == config.vocab_size:
        return matrix_VD
    return matrix_VD[_ascending(source, layout.token_map, config)]


def _counts(layout: Layout) -> tuple[int, int, bool]:
    """Heads, blocks a head, and whether each has a vocabulary matrix of its own."""
    blocks: dict[int, set[int]] = {}
    outs: dict[int, set[int]] = {}
    for ours, theirs in layout.names.items():
        number, place, part = ours.split(".", 2)
        if part not in _PARTS | _OUT:
            raise ValueError(f"{theirs} is no tensor of such heads: expected linear layers alone")
        (blocks if part in _PARTS else outs).setdefault(int(number), set()).add(int(place))
    heads = set(blocks) | set(outs)
    missing = sorted(set(range(len(heads))) - heads)
    if missing or not blocks:
        raise ValueError(f"head {(missing or [0])[0]} is missing: download the heads anew")
    num_layers = len(blocks.get(0, ()))
    for head in sorted(heads):
        if blocks.get(head) != set(range(num_layers)):
            raise ValueError(
                f"head {head} has blocks {sorted(blocks.get(head, ()))}, head 0 has "
                f"{num_layers}: all must have as many, counted from 0"
            )
        if outs.get(head) != outs.get(0) or outs.get(head, {num_layers}) != {num_layers}:
            raise ValueError(
                f"head {head} has vocabulary matrices at {sorted(outs.get(head, ()))}: expected "
                f"one behind the {num_layers} blocks of every head, or none in any"
            )
    return len(heads), num_layers, bool(outs)


def _compare(source: Source, layout: Layout, config: HeadsConfig) -> None:
    expected = expected_shapes(config, vocab_bias=config.vocab_bias in layout.names)
    expected.pop(DRAFT_TOKENS, None)
    biases = {name for name in expected if name.endswith(".linear.bias")}
    if not biases & set(layout.names):
        layout.notices.append("the heads have no biases: they are stored as zeros")
        expected = {name: shape for name, shape in expected.items() if name not in biases}
    if missing := sorted(set(expected) - set(layout.names)):
        raise ValueError(f"{source.name!r} lacks {missing[0]} of its heads: download them anew")
    if surplus := sorted(set(layout.names) - set(expected)):
        raise ValueError(
            f"{source.name!r}: {layout.names[surplus[0]]} is no tensor of {config.kind} heads with "
            f"{config.num_layers} blocks"
        )
    shapes = {layout.names[name]: shape for name, shape in expected.items()}
    if layout.matrix is not None:
        full = source.shape(layout.matrix)[:1] == (config.vocab_size,)
        rows = config.vocab_size if full else config.num_candidates
        assert rows is not None and config.hidden_size is not None
        shapes[layout.matrix] = (rows, config.hidden_size)
    for name, shape in shapes.items():
        source.check_shape(name, shape, ", as the others imply")


def _compare_claims(layout: Layout, config: HeadsConfig) -> None:
    for ours, (key, claimed) in layout.claims.items():
        got = getattr(config, ours)
        if ours == "num_heads" and claimed > got:
            raise ValueError(
                f"config.json says {key}: {claimed}, but the weights hold {got} heads: download "
                "them anew, or correct the number"
            )
        if claimed != got:
            layout.notices.append(
                f"config.json says {key}: {claimed}, the weights hold {got}: taken from the weights"
            )


def _ascending(source: Source, token_map: str, config: HeadsConfig) -> Tensor:
    ordered_V, order = source.read(token_map, expected=IDS).sort()
    assert config.vocab_size is not None
    if not are_ascending(ordered_V, config.vocab_size):
        raise ValueError(
            f"{source.name!r}: {token_map} must hold different token ids from 0 to "
            f"{config.vocab_size - 1}"
        )
    return order
