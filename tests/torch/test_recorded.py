"""Programs that are recorded by other means than the compiler, and sizes that only data decide."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attnspan import (
    cache,
    causal,
    documents,
    from_dense,
    from_predicate,
    global_keys,
    groups,
    key_padding,
    keys,
    prefix,
    segments,
    spans,
    window,
)
from attnspan.torch import attention, scaled_dot_product_attention

FIRST, OTHER = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
DENSE = torch.ones(6, 6, dtype=torch.bool).tril(), torch.arange(6)[None].expand(6, 6) < 3
Mask = Callable[[Tensor], Any]

#: Masks of an array, with the array that is recorded and another one.
MASKS: dict[str, tuple[Mask, Tensor, Tensor]] = {
    "from_dense": (from_dense, *DENSE),
    "from_predicate": (lambda x: from_predicate(lambda *at: x[at[2]] == x[at[3]]), FIRST, OTHER),
    "segments": (lambda x: causal() & segments(x), FIRST, OTHER),
    "keys": (keys, FIRST == 0, OTHER != 1),
    "key_padding": (key_padding, torch.tensor([4]), torch.tensor([2])),
    "documents": (documents, torch.tensor([0, 3, 6]), torch.tensor([0, 2, 6])),
    "groups": (lambda x: causal() | groups(x), FIRST, torch.tensor([0, 1, 1, 1, 2, 2])),
    "prefix": (prefix, torch.tensor([4]), torch.tensor([2])),
    "global_keys": (lambda x: (window(1) | global_keys(1)) & segments(x), FIRST, OTHER),
    "spans": (spans, causal().prepare(6, 6, like=FIRST).bounds, window(2).prepare(6, 6, like=FIRST).bounds),
}


def _call_with(mask: Mask) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, x: attention(q, q, q, mask=mask(x))


def _decode(q: Tensor, lengths: Tensor) -> Tensor:
    return attention(q[:, :, :2], q, q, mask=cache(lengths) & causal())


def _prefill(q: Tensor, lengths: Tensor) -> Tensor:
    return attention(q, q, q, mask=cache(lengths) & causal())


def _drop_in(q: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q, q, attn_mask=mask)


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = {
    name: (_call_with(mask), *arrays) for name, (mask, *arrays) in MASKS.items()
} | {
    "decode": (_decode, torch.tensor([6]), torch.tensor([3])),
    "prefill": (_prefill, torch.tensor([6]), torch.tensor([6])),
    "drop-in": (_drop_in, *DENSE),
    "floating": (_drop_in, torch.randn(6, 6), torch.randn(6, 6)),
}


@pytest.mark.parametrize("recorder", ["jit", "real", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_mask_is_that_of_the_arrays(name: str, recorder: str) -> None:
    call, first, other = CALLS[name]
    q = torch.randn(1, 2, 6, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace", category=DeprecationWarning)
        if recorder == "jit":
            recorded = torch.jit.trace(call, (q, first), check_trace=False)
        else:
            recorded = make_fx(call, tracing_mode=recorder)(q, first)
    torch.testing.assert_close(recorded(q, other), call(q, other))


def test_a_recorded_mask_meets_other_lengths() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace", category=DeprecationWarning)
        recorded = torch.jit.trace(
            lambda q, k: attention(q, k, k, mask=causal()), (torch.randn(1, 1, 2, 8), torch.randn(1, 1, 4, 8))
        )
    with pytest.raises(RuntimeError, match="spans over 4"):
        recorded(torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8))


def _of_kept_rows(x: Tensor, lengths: Tensor, keep: Tensor) -> list[Tensor]:
    """Calls whose batch only data know, that of q and that of the masks apart."""
    x, lengths = x[keep], lengths[keep]
    valid = torch.arange(8) < lengths[:, None]
    masks = [
        causal(),
        causal() & key_padding(lengths),
        segments(torch.arange(8).expand(x.shape[0], 8) // 3),
        prefix(lengths),
        keys(valid),
        from_dense(valid[:, None, None].expand(-1, 1, 8, 8)),
        from_predicate(lambda b, _, __, k: k < lengths[b]),
        documents(torch.tensor([0, 3, 8])),
    ]
    added = lengths[:, None, None, None] * torch.ones(8, 8)
    return [attention(x, x, x, mask=mask) for mask in masks] + [
        scaled_dot_product_attention(x, x, x, attn_mask=valid[:, None, None]),
        scaled_dot_product_attention(x, x, x, attn_mask=added),
        scaled_dot_product_attention(x, x, x, is_causal=True),
    ]


def _of_kept_tokens(x: Tensor, ids: Tensor, keep: Tensor) -> list[Tensor]:
    x, ids = x[:, :, keep], ids[keep]
    return [
        attention(x, x, x, mask=causal() & segments(ids)),
        scaled_dot_product_attention(x, x, x, is_causal=True),
        scaled_dot_product_attention(x, x, x, attn_mask=ids[:, None] == ids),
    ]


@pytest.mark.parametrize("how", ["export", "compile"])
@pytest.mark.parametrize("call", [_of_kept_rows, _of_kept_tokens])
def test_sizes_that_only_data_decide(call: Callable[..., list[Tensor]], how: str) -> None:
    rows = call is _of_kept_rows
    inputs = torch.randn(6, 2, 8, 16), torch.arange(3, 9) if rows else torch.arange(8) // 3
    keep = torch.tensor([True, False, True, True, False, True] + [True] * 2 * (not rows))
    if how == "compile":
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            found = torch.compile(call, fullgraph=True, backend="eager")(*inputs, keep)
            other = torch.compile(call, fullgraph=True, backend="eager")(*inputs, ~keep)
    else:

        class Module(torch.nn.Module):
            def forward(self, *given: Tensor) -> list[Tensor]:
                return call(*given)

        program = torch.export.export(Module(), (*inputs, keep)).module()
        found, other = program(*inputs, keep), program(*inputs, ~keep)
    for got, exact in zip([*found, *other], [*call(*inputs, keep), *call(*inputs, ~keep)], strict=True):
        torch.testing.assert_close(got, exact)
