"""Exact attention in tiles, without an array of queries x keys (Dao et al. 2022); the kernel's contract is
kernels/include/mpipipe/flash_attention.h.

    o[i] = sum over seen j of softmax_j(scale q[i] . k[j]) v[j]    kept for backward: q, k, v, o, a float each

Invariants
  1. The bits do not depend on the number of threads.
  2. A query that sees nothing gives 0, and no gradient.
  3. Results lie in memory as their inputs do, o and dq as q: where q is a transposed view of a projection's
     output, the way back is free.
Float32 and bfloat16 of the processor run on the kernel, summed in float32, and so they do on a GPU, but
bfloat16 only where torch's own form in tiles is switched off; anything else is torch's own attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mpipipe.ops.library import Function, define, differentiate, once_differentiable, traced, wants_gradient
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.parts import distance
from mpipipe.ops.pointers import address, check, contiguous

Tensor = torch.Tensor
Keys = Tensor | None  # which are seen: as lengths, as a mask, or all
_KERNELS = by_device(
    {
        torch.float32: ("flash_attention_f32", "flash_attention_backward_f32"),
        torch.bfloat16: ("flash_attention_bf16", "flash_attention_backward_bf16"),
    }
)
_WIDEST_ON_GPU = 128  # kMostWidth of the header


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of q (B, H, T, E) to k and v (B, Hk, S, E): (B, H, T, E), of q's dtype and order of strides.

    Hk divides H: query head h reads key head h // (H // Hk). causal: query i sees the keys j <= i, also where
    T != S. key_lengths (B,) int64: that many keys of each sample are seen; key_mask (B, S) bool: those.
    scale: of the products, 1 / sqrt(E) unless told. Keys and values that a mask hides should be finite.
    Autocast changes nothing here: the products are of q's dtype.
    Raises ValueError for shapes, dtypes or devices that do not fit, and for a length outside [0, S].
    """
    _check(q, k, v, key_lengths, key_mask)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    if not _served(q) or _torch_is_faster(q):
        return _by_torch(q, k, v, key_lengths, key_mask, causal, factor)
    if traced(q):
        return _operator(q, k, v, key_lengths, key_mask, causal, factor)[0]
    if wants_gradient(q, k, v):
        result: Tensor = _FlashAttention.apply(q, k, v, key_lengths, key_mask, causal, factor)
        return result
    return _forward(q, k, v, key_lengths, key_mask, causal, factor)[0]  # some microseconds sooner


def _served(q: Tensor) -> bool:
    return (device_type(q), q.dtype) in _KERNELS and not (q.is_cuda and q.shape[3] > _WIDEST_ON_GPU)


def _torch_is_faster(q: Tensor) -> bool:
    """Of a GPU torch's form in tiles uses the units for bfloat16, ours does not; a rank switches it off
    (mpipipe.ops.device), which leaves torch the plain one."""
    return q.is_cuda and q.dtype is torch.bfloat16 and torch.backends.cuda.flash_sdp_enabled()


def _check(q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys) -> None:
    of_q, of_k, dtype = q.shape, k.shape, q.dtype
    if len(of_q) != 4 or len(of_k) != 4:
        raise ValueError(
            f"flash_attention: q {tuple(q.shape)} and k {tuple(k.shape)} must have 4 dimensions: batch, "
            "heads, tokens, width; view them so"
        )
    (b, h, _, e), (samples, hk, s, width) = of_q, of_k
    if v.shape != of_k:
        raise ValueError(f"flash_attention: k is {tuple(k.shape)}, v is {tuple(v.shape)}: they must be equal")
    if samples != b or width != e or e == 0:
        raise ValueError(
            f"flash_attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}: batch and width must be "
            "equal, and the width not 0"
        )
    if h % hk if hk else h:
        raise ValueError(f"flash_attention: {h} heads of q cannot share {hk} of k: it must be a multiple")
    if k.dtype is not dtype or v.dtype is not dtype or not dtype.is_floating_point:
        raise ValueError(
            f"flash_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one floating point type"
        )
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not q.device == k.device == v.device:
        raise ValueError(f"flash_attention: q is on {q.device}, k on {k.device}, v on {v.device}: move them")
    if key_lengths is not None:
        _check_keys("key_lengths", key_lengths, (b,), torch.int64, q.device)
    if key_mask is not None:
        _check_keys("key_mask", key_mask, (b, s), torch.bool, q.device)


def _check_keys(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if x.shape != shape or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"flash_attention: {name} is {tuple(x.shape)} {x.dtype} on {x.device}; it must be "
            f"{tuple(shape)} {dtype} on {device}"
        )


def _check_lengths(key_lengths: Tensor, keys: int) -> None:
    lengths = key_lengths.tolist()
    if lengths and not 0 <= min(lengths) <= max(lengths) <= keys:
        raise ValueError(
            f"flash_attention: key_lengths go from {min(lengths)} to {max(lengths)}; with {keys} keys they "
            f"must be in [0, {keys}]"
        )


class _FlashAttention(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        o, lse = _forward(*inputs)
        _save(ctx, inputs, (o, lse))
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_backward(grads[0], *ctx.saved_tensors, *ctx.how, apart=False), None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, causal, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.how = (causal, scale)


def _rows(x: Tensor) -> Tensor:
    """x with the elements of a token side by side, as the kernel needs them; most often x itself."""
    return x if x.stride()[3] == 1 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Memory for a result, in x's order of strides; where that is none of rows, as of an x that is expanded,
    contiguous."""
    y = torch.empty_like(x)
    return y if y.stride()[3] == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for their gradients: in one tensor where they are parts of one, so that nothing has to bring
    these together (mpipipe.ops.parts)."""
    if step := distance((q, k, v)):
        dq, dk, dv = q.new_empty(3 * q.numel()).as_strided((3, *q.shape), (step, *q.stride())).unbind()
        return dq, dk, dv
    return _like(q), _like(k), _like(v)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    key_lengths, key_mask = contiguous(key_lengths), contiguous(key_mask)
    if key_lengths is not None:
        _check_lengths(key_lengths, k.shape[2])
    o = _like(q)
    b, h, t, _ = q.shape
    lse = q.new_empty(b, h, t, dtype=torch.float32)
    _KERNELS[device_type(q), q.dtype][0](
        *_problem(q, k, v, key_lengths, key_mask, causal, scale),
        o.data_ptr(), o.stride(), lse.data_ptr(), *workers(q),
    )  # fmt: skip
    return o, lse


def _backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys,
    o: Tensor, lse: Tensor, causal: bool, scale: float, *, apart: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, d_o = _rows(q), _rows(k), _rows(v), _rows(d_o)
    key_lengths, key_mask = contiguous(key_lengths), contiguous(key_mask)
    dq, dk, dv = (_like(q), _like(k), _like(v)) if apart else _like_all(q, k, v)
    _KERNELS[device_type(q), q.dtype][1](
        *_problem(q, k, v, key_lengths, key_mask, causal, scale),
        o.data_ptr(), o.stride(), lse.data_ptr(), d_o.data_ptr(), d_o.stride(),
        dq.data_ptr(), dq.stride(), dk.data_ptr(), dk.stride(), dv.data_ptr(), dv.stride(),
        *workers(q),
    )  # fmt: skip
    return dq, dk, dv


def _problem(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, causal: bool, scale: float
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments that both kernels begin with."""
    (b, h, t, e), (_, hk, s, _) = q.shape, k.shape
    return (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(), k.stride(), v.stride(), b, h, hk, t, s, e,
        causal, scale, address(key_lengths), address(key_mask),
    )  # fmt: skip


# -- the registered operators: nobody has looked at what they are called with -----------------------------


def _check_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, o: Tensor, lse: Tensor
) -> None:
    _check(q, k, v, key_lengths, key_mask)
    for name, x in (("d_o", d_o), ("o", o)):
        check(name, x, q.shape, q)
    check("lse", lse, q.shape[:3], q.new_empty(0, dtype=torch.float32))


def _check_served(q: Tensor) -> None:
    if not _served(q):
        raise ValueError(
            f"flash_attention: q is {tuple(q.shape)} {q.dtype} on {q.device}; the compiled kernels take "
            f"float32 and bfloat16 of the CPU or of a GPU, there with widths up to {_WIDEST_ON_GPU}"
        )


def _operator_forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, key_lengths, key_mask)
    _check_served(q)
    return _forward(q, k, v, key_lengths, key_mask, causal, scale)


def _operator_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys,
    o: Tensor, lse: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_backward(d_o, q, k, v, key_lengths, key_mask, o, lse)
    _check_served(q)
    if key_lengths is not None:  # of a GPU that waits for it, as nobody knows who calls
        _check_lengths(key_lengths, k.shape[2])
    return _backward(d_o, q, k, v, key_lengths, key_mask, _rows(o), lse.contiguous(), causal, scale)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, *_: Any
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, key_lengths, key_mask)
    return _like(_rows(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, o: Tensor, lse: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_backward(d_o, q, k, v, key_lengths, key_mask, o, lse)
    return _like(_rows(q)), _like(_rows(k)), _like(_rows(v))


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Keys, key_mask: Keys, causal: bool, scale: float
) -> Tensor:  # fmt: skip
    """The meaning of the kernel; and the way of any other dtype or device."""
    shared = q.shape[1] != k.shape[1]
    if key_lengths is None and key_mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)
    t, s = q.shape[2], k.shape[2]
    seen = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if key_lengths is not None:
        if not traced(key_lengths):
            _check_lengths(key_lengths, s)
        seen = seen & (torch.arange(s, device=q.device) < key_lengths[:, None])[:, None, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=shared)


_operator = define(
    "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? key_mask, bool causal, "
    "float scale) -> (Tensor, Tensor)",
    _operator_forward,
    _fake_forward,
)
_backward_operator = define(
    "flash_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor? key_lengths, "
    "Tensor? key_mask, Tensor o, Tensor lse, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    _operator_backward,
    _fake_backward,
)
differentiate(
    "flash_attention",
    lambda ctx, d_o, _: (*_backward_operator(d_o, *ctx.saved_tensors, *ctx.how), None, None, None, None),
    lambda ctx, inputs, output: _save(ctx, inputs, output),
)
