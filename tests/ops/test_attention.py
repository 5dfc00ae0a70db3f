"""Attention with dropout against the formula, with the mask taken from the stream by hand."""

import pytest
import torch
import torch.nn.functional as F

from mpipipe.ops import attention, dropout, stream_key

STREAM = {"key": stream_key(2, "attn/scaled_dot_product_attention.0"), "step": 3, "micro": 1}


def qkv(heads: int = 4, key_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, h, 5, 8, generator=g, dtype=torch.float64).to(dtype)
        for h in (heads, key_heads, key_heads)
    ]


def formula(q, k, v, mask, p):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5 + mask
    return dropout(torch.softmax(scores, -1), p, **STREAM) @ v


def causal(t: int = 5) -> torch.Tensor:
    return torch.full((t, t), -torch.inf, dtype=torch.float64).triu(1)


def test_with_dropout():
    q, k, v = qkv()
    for mask, options in (
        (0.0, {}),
        (causal(), {"is_causal": True}),
        (causal(), {"attn_mask": causal()}),
        (causal(), {"attn_mask": causal() == 0}),
    ):
        got = attention(q, k, v, dropout_p=0.3, **options, **STREAM)
        torch.testing.assert_close(got, formula(q, k, v, mask, 0.3), rtol=1e-12, atol=1e-12)


def test_grouped_heads():
    q, k, v = qkv(4, 2)
    got = attention(q, k, v, dropout_p=0.3, enable_gqa=True, **STREAM)
    expected = formula(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), 0.0, 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_only_the_ends_are_of_its_dtype(dtype):
    """In its dtype, computed in float32: its own products would round the scores, too."""
    q, k, v = qkv(dtype=dtype)
    q, k = 3.0 * q, 3.0 * k
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(q, k, v, None, 2**-40, True, **STREAM)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, attention(*(x.bfloat16() for x in (q, k, v)), None, 2**-40, True, **STREAM))
    wide = qkv()[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(wide, wide, wide, None, 0.3, **STREAM).dtype == torch.float64


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q, k, v = qkv()
    got = attention(q, k, v, None, 2**-40, scale=scale, **STREAM)
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_tiny_rate_is_torch_attention():
    """Of the rate 2**-40 the threshold is 0: all is kept, so torch's own kernel is the reference."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, k, v = qkv(dtype=dtype)
        got = attention(q, k, v, None, 2**-40, True, scale=0.2, **STREAM)
        assert got.dtype == dtype
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_row_that_may_look_at_nothing_gives_zero_and_has_no_gradient(kind):
    q, k, v = (x.requires_grad_() for x in qkv())
    seen = torch.ones(5, 5, dtype=torch.bool)
    seen[2] = False
    mask = seen if kind == "bool" else torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    got = attention(q, k, v, mask, 0.3, **STREAM)
    grads = torch.autograd.grad(got.square().sum(), (q, k, v))
    assert (got[:, :, 2] == 0).all()
    assert (grads[0][:, :, 2] == 0).all()
    rows = [0, 1, 3, 4]  # the others are as if it were not there
    expected = formula(q, k, v, 0.0, 0.3)[:, :, rows]
    torch.testing.assert_close(got[:, :, rows], expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for g, w in zip(grads, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_without_dropout_it_is_torchs_call():
    q, k, v = qkv(dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention(q, k, v, is_causal=True, **STREAM), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    inputs = [x[:1, :2, :3, :4].clone().requires_grad_() for x in qkv()]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, None, 0.4, is_causal, **STREAM), inputs
    )
