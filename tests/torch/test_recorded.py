"""Programs that are recorded by other means than the compiler, and sizes that only data decide."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import everything, few
from samples import lengths
from samples.lengths import Sizes
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import attnspan
from attnspan import cache, causal, documents, from_dense, from_predicate, key_padding, keys, prefix, segments
from attnspan.torch import attention, scaled_dot_product_attention

SIZES, LENGTH = Sizes(batch=2, length=12, parts=3), 12
Call, Arrays = Callable[..., Tensor], tuple[Tensor, ...]


def _decode(q: Tensor, lengths: Tensor) -> Tensor:
    return attention(q[:, :, :2], q, q, mask=cache(lengths) & causal())


def _drop_in(q: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _call_with(build: Callable[..., Any]) -> Call:
    return lambda q, *arrays: attention(q, q, q, mask=build(LENGTH, *arrays))


def _of_ids(n: int, ids: Tensor) -> Any:
    return from_predicate(lambda b, _, q, k: ids[b, q] == ids[b, k])


#: Calls of q and of arrays, with the arrays that are recorded and other ones: each mask that reads an array.
CALLS: dict[str, tuple[Call, Arrays, Arrays]] = {
    x.name: (_call_with(x.build), x.arrays(SIZES), x.arrays(SIZES))
    for x in lengths.MASKS
    if x.function in attnspan.masks.__all__ and x.arrays(SIZES)
}
IDS = torch.arange(LENGTH).expand(2, -1)
DENSE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), torch.arange(LENGTH).expand(LENGTH, -1) < 3
CALLS |= {
    "from_predicate, ids": (_call_with(_of_ids), (IDS // 3,), (IDS // 2,)),
    "decode": (_decode, (torch.tensor([6, 12]),), (torch.tensor([3, 4]),)),
    "drop-in": (_drop_in, DENSE[:1], DENSE[1:]),
    "floating": (_drop_in, (torch.randn(LENGTH, LENGTH),), (torch.randn(LENGTH, LENGTH),)),
}


# The proxies of all recorders meet the same operators: in the ordinary run each call goes one way.
@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("recorder", ["jit", "real", "symbolic"])
@pytest.mark.parametrize("name", few(CALLS, 12))
def test_a_recorded_mask_is_that_of_the_arrays(name: str, recorder: str) -> None:
    call, first, other = CALLS[name]
    q = torch.randn(2, lengths.HEADS, LENGTH, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace")
        if recorder == "jit":
            recorded = torch.jit.trace(call, (q, *first), check_trace=False)
        else:
            recorded = make_fx(call, tracing_mode=recorder)(q, *first)
    torch.testing.assert_close(recorded(q, *other), call(q, *other))


def test_a_recorded_mask_meets_other_lengths() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace")
        recorded = torch.jit.trace(
            lambda q, k: attention(q, k, k, mask=causal()), (torch.randn(1, 1, 2, 8), torch.randn(1, 1, 4, 8))
        )
    with pytest.raises(RuntimeError, match="spans over 4"):
        recorded(torch.randn(1, 1, 2, 8), torch.randn(1, 1, 5, 8))


def _of_kept_rows(x: Tensor, lengths: Tensor, ids: Tensor, keep: Tensor) -> list[Tensor]:
    """Calls whose batch only data know, that of q and that of the masks apart; then those whose length is."""
    rows, lengths = x[keep], lengths[keep]
    valid = torch.arange(6) < lengths[:, None]
    masks = [
        causal() & key_padding(lengths),
        segments(torch.arange(6).expand(rows.shape[0], 6) // 3),
        from_dense(valid[:, None, None].expand(-1, 1, 6, 6)),
        from_predicate(lambda b, _, __, k: k < lengths[b]),
    ]
    if everything():
        masks += [prefix(lengths), keys(valid), documents(torch.tensor([0, 3, 6]))]
    added = lengths[:, None, None, None] * torch.ones(6, 6)
    given = {"attn_mask": valid[:, None, None]}, {"attn_mask": added}
    tokens, ids = x[:, :, keep], ids[keep]
    step = 1 if everything() else 2
    return [
        *(attention(rows, rows, rows, mask=mask) for mask in masks[::step]),
        *(scaled_dot_product_attention(rows, rows, rows, **options) for options in given[::step]),
        attention(tokens, tokens, tokens, mask=causal() & segments(ids)),
        scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=ids[:, None] == ids),
    ]


class _Kept(torch.nn.Module):
    def forward(self, *given: Tensor) -> list[Tensor]:
        return _of_kept_rows(*given)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile", pytest.param("export", marks=pytest.mark.long)])
def test_sizes_that_only_data_decide(how: str) -> None:
    inputs = torch.randn(6, 2, 6, 16), torch.arange(1, 7), torch.arange(6) // 3
    keep = torch.tensor([True, False, True, True, False, True])
    if how == "compile":
        run = torch.compile(_of_kept_rows, fullgraph=True, backend="eager")
    else:
        run = torch.export.export(_Kept(), (*inputs, keep)).module()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for kept in (keep, ~keep):
            torch.testing.assert_close(run(*inputs, kept), _of_kept_rows(*inputs, kept))
