"""Attention that reads what is in use of a cache.

Shapes: B rows, H query heads, G heads of keys, N queries, S slots, X of a head.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from medusa_heads.machine.attention import attention_in_use
from medusa_heads.target.attention import additive

B, H, S, X = 2, 6, 200, 8


def case(shared: int, nodes: int, seen: int, batch: int = B) -> tuple[Tensor, ...]:
    """Queries, keys, values, and a mask of `seen` slots, of which the last token sees the last."""
    random = torch.Generator().manual_seed(seen)
    query_BHNX = torch.randn(B, nodes, H, X, generator=random).transpose(1, 2)
    key_BGSX, value_BGSX = torch.randn(2, B, shared, S, X, generator=random)
    allowed_B1NS = torch.rand(batch, 1, nodes, S, generator=random) < 0.5
    allowed_B1NS[..., 0] = allowed_B1NS[:, :, -1, seen - 1] = True
    allowed_B1NS[..., seen:] = False
    return query_BHNX, key_BGSX, value_BGSX, additive(allowed_B1NS, torch.float32)


@pytest.mark.parametrize("shared", [1, 2, H])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("seen", [1, 63, 64, 65, 128, 129, S])
def test_it_is_attention_over_all_of_the_cache(shared: int, nodes: int, seen: int) -> None:
    for batch, scale in ((B, None), (1, 0.5), (1, None)):
        query, key, value, mask = case(shared, nodes, seen, batch)
        if batch == 1 and scale is None:
            mask = mask[:, :, -1:]  # all tokens see the same
        every = {"scale": scale, "attn_mask": mask, "enable_gqa": True}
        expected_BHNX = scaled_dot_product_attention(query, key, value, **every)  # type: ignore[arg-type]
        got_BNHX = attention_in_use(query, key, value, mask, scale)
        assert got_BNHX.is_contiguous()
        torch.testing.assert_close(got_BNHX.transpose(1, 2), expected_BHNX)


def test_what_is_not_in_use_is_not_read() -> None:
    query, key, value, mask = case(2, 4, 100)
    expected = attention_in_use(query, key, value, mask, None)
    value[:, :, 128:] = torch.nan  # which no mask keeps out of a sum
    assert torch.equal(attention_in_use(query, key, value, mask, None), expected)
    value[:, :, 99] = torch.nan
    assert attention_in_use(query, key, value, mask, None).isnan().any()


def test_a_text_that_sees_nothing_is_read_as_ever() -> None:
    query, key, value, mask = case(H, 3, 70)
    mask = torch.full_like(mask, torch.finfo(mask.dtype).min)
    expected_BHNX = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    got_BNHX = attention_in_use(query, key, value, mask, None)
    torch.testing.assert_close(got_BNHX.transpose(1, 2), expected_BHNX)
