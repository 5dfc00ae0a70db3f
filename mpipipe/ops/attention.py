"""Attention (Vaswani et al. 2017) with dropout on its weights, drawn from the random stream.

Torch's fused kernels draw that dropout from the process-wide generator, so a layer with dropout takes
this plain form; without dropout the call goes to torch unchanged, and with the same bits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mpipipe.ops.dropout import dropout


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: int,
    step: int,
    micro: int,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of q (..., H, T, E), k (..., Hk, S, E), v (..., Hk, S, Ev).

    Returns (..., H, T, Ev) in q's dtype, under autocast in its dtype. The weights (..., H, T, S) are dropped
    in contiguous order. float16 and bfloat16 are computed in float32, as torch's own plain form does.
    """
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    device = "cpu" if q.is_meta else q.device.type
    if torch.is_autocast_enabled(device):  # which would make its dtype of the products here, too
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    with torch.autocast(device, enabled=False):
        wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        if enable_gqa:  # each key and value head serves H / Hk query heads
            k = k.repeat_interleave(q.size(-3) // k.size(-3), -3)
            v = v.repeat_interleave(q.size(-3) // v.size(-3), -3)
        # the root of the scale on either side: the scores of half-size types stay in range
        factor = 1.0 / math.sqrt(q.size(-1)) if scale is None else scale
        root = math.sqrt(abs(factor))
        scores = (q.to(wide) * math.copysign(root, factor)) @ (k.to(wide) * root).transpose(-2, -1)
        nothing = None
        if is_causal:
            hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        elif attn_mask is not None:  # what sees nothing sees all, then gives 0: softmax of -inf alone is NaN
            boolean = attn_mask.dtype == torch.bool
            hidden = ~attn_mask if boolean else attn_mask == -math.inf
            nothing = hidden.all(-1, keepdim=True)
            if boolean:
                scores = scores.masked_fill(hidden & ~nothing, -math.inf)
            else:
                scores = scores + attn_mask.masked_fill(nothing, 0.0)
        o = dropout(torch.softmax(scores, -1), dropout_p, key, step, micro) @ v.to(wide)
        if nothing is not None:
            o = o.masked_fill(nothing, 0.0)  # as torch has it
        return o.to(q.dtype)
