"""Drop-in for nested tensors: jagged (B, H, j, D) as packed documents, without padding."""

from typing import Any

import torch
from torch import Tensor

from attnspan.call.biases import is_floating
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import causal, documents

from . import compat
from ._attention import attention


def attend_jagged(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, is_causal: bool, enable_gqa: bool, **options: Any
) -> Tensor:
    """`scaled_dot_product_attention` of jagged tensors. `is_causal` aligns first queries and first keys."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        _check(name, x)
    remedy = 'Mask the values: attention(..., mask=... & documents(x.offsets()), layout="thd")'
    expect(attn_mask is None, "attn_mask", "None with nested tensors", type(attn_mask).__name__, remedy)
    remedy = "Pass enable_gqa=True to share key heads"
    expect(enable_gqa or q.shape[1] == k.shape[1], "heads", "as many key as query heads", k.shape[1], remedy)
    expect(_alike(k, v), "value", "the offsets of key", "others", "Make both of one batch", error=ShapeError)
    cu_q, cu_k, q_index = q.offsets(), k.offsets(), None  # type: ignore[attr-defined]
    fits, remedy = cu_q.shape == cu_k.shape, "Give an absent sequence no keys"
    expect(fits, "key", "as many sequences as query", cu_k.shape[0] - 1, remedy, error=ShapeError)
    alike = _alike(q, k)
    mask: Any = documents(cu_q) if alike else documents(cu_q, cu_k)
    if is_causal:
        mask = causal() & mask
        if not alike:
            rows = torch.arange(q.values().shape[1], device=cu_q.device)
            own = torch.searchsorted(cu_q, rows, right=True) - 1
            q_index = rows + (cu_k - cu_q)[own]
    inputs = (x.values().unsqueeze(0) for x in (q, k, v))
    out = attention(*inputs, mask=mask, q_index=q_index, **options)[0].transpose(0, 1)
    # The same tensor of offsets is the same symbolic length, so that you can add the query's residual.
    return torch.nested.nested_tensor_from_jagged(out, cu_q).transpose(1, 2)  # type: ignore[no-untyped-call]


def _check(name: str, x: Any) -> None:
    wanted, jagged = "a jagged tensor (B, H, j, D), as query", x.is_nested and x.layout is torch.jagged
    remedy = "Make it by torch.nested.nested_tensor(parts, layout=torch.jagged), parts of (j, H, D)"
    expect(jagged and is_floating(x), name, wanted, "another tensor", remedy, error=DtypeError)
    remedy = "Call .transpose(1, 2) of (B, j, H, D)"
    expect(
        x.dim() == 4 and compat.ragged_dim(x) == 2, name, wanted, f"{x.dim()} dims", remedy, error=ShapeError
    )
    remedy = "Pack it again: torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)"
    expect(x.lengths() is None, name, "sequences without gaps", "lengths", remedy, error=ShapeError)


def _alike(x: Any, y: Any) -> bool:
    """Whether two tensors have equal lengths. A compiler knows this only for the same tensor of offsets."""
    a, b = x.offsets(), y.offsets()
    if a is b or torch.compiler.is_compiling():
        return bool(a is b or x.shape[2] == y.shape[2])
    return torch.equal(a, b)
