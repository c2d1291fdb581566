"""An array whose storage was freed or shrunk since it was made is refused, and not read."""

import pytest
import torch
from samples.torch_calls import OPERATOR_ERROR
from torch import Tensor

from attnspan import causal, relative, segments, t5_buckets
from attnspan.torch import PagedCache, RollingCache, StaticCache, attention

pytestmark = pytest.mark.compiled_module("what is refused would end the process")
REFUSED = r"storage of at least \d+ bytes, got \d+: it was freed or shrunk"
INPUTS = ("q", "k", "v", "bounds", "bias", "sinks", "dropout_seed", "q_index", "k_index")
GIVEN = (*INPUTS, "dout", "dlse", "out", "lse")


def _arrays() -> dict[str, Tensor]:
    x = {name: torch.randn(1, 2, 20, 16) for name in ("q", "k", "v", "out", "dout")}
    x |= {name: torch.randn(1, 2, 20) for name in ("lse", "dlse")}
    x["bounds"] = causal().prepare(20, 20, like=x["q"]).lowered.bounds.clone()
    x |= {"bias": torch.randn(1, 1, 20, 20), "sinks": torch.randn(2), "dropout_seed": torch.tensor([[3, 4]])}
    return x | {name: torch.arange(20, dtype=torch.int32)[None] for name in ("q_index", "k_index")}


def _shrink(x: Tensor, part: float) -> None:
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(int(size * part))


@pytest.mark.parametrize("part", [0, 0.5])
@pytest.mark.parametrize("name", GIVEN)
def test_operators_refuse_it(name: str, part: float) -> None:
    x = _arrays()
    rest = (0.2, 0.0, x["bias"], 4, x["sinks"], 0.1, x["dropout_seed"], x["q_index"], x["k_index"])
    _shrink(x[name], part)
    if name in INPUTS:
        with pytest.raises(OPERATOR_ERROR, match=REFUSED):
            torch.ops.attnspan.attention(x["q"], x["k"], x["v"], x["bounds"], *rest)
    arrays = [x[n] for n in ("dout", "dlse", "q", "k", "v", "bounds", "out", "lse")]
    with pytest.raises(OPERATOR_ERROR, match=REFUSED):
        torch.ops.attnspan.attention_backward(*arrays, *rest)


@pytest.mark.parametrize("strided", [False, True], ids=["read in place", "copied"])
def test_eager_calls_and_saved_tensors(strided: bool) -> None:
    q, v = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    k = torch.randn(1, 2, 20, 32)[..., ::2] if strided else torch.randn(1, 2, 20, 16)
    out = attention(q, k.requires_grad_(), v, mask=causal())
    _shrink(k, 0)
    with pytest.raises(OPERATOR_ERROR, match=REFUSED):
        attention(q, k, v, mask=causal())
    with pytest.raises(OPERATOR_ERROR, match=REFUSED):
        out.sum().backward()


def test_arrays_of_masks_and_biases() -> None:
    q, ids, table = torch.randn(1, 2, 20, 16), (torch.arange(20) // 7)[None], torch.randn(2, 32)
    call = {"mask": segments(ids), "bias": relative(table, t5_buckets())}
    for x, name, size, left in ((ids, "mask", 160, 0), (table, "bias", 256, 128)):
        _shrink(x, left / size)
        with pytest.raises(OPERATOR_ERROR, match=rf"expected a storage of {size} bytes .* got {left} bytes"):
            attention(q, q, q, **{name: call[name]})


@pytest.mark.parametrize("part", [0, 0.5])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_framework_code(name: str, part: float) -> None:
    x = {n: torch.randn(1, 2, 20, 16) for n in ("q", "k", "v")}
    _shrink(x[name], part)
    with pytest.raises(OPERATOR_ERROR, match=rf"{name}: expected a storage of 2560 bytes .* got \d+ bytes"):
        attention(**x, backend="math")


CACHES = {
    "static": lambda: StaticCache(2, 1, max_len=8, head_dim=4),
    "rolling": lambda: RollingCache(2, 1, window=7, head_dim=4),
    "paged": lambda: PagedCache(4, 8, 1, 4, batch=2, max_len=8),
}


#: Buffers, and calls that read them: of every cache, and of each kind.
READ = [("lengths", call) for call in ("reset", "positions", "truncate", "update")]
READ += [("_keys", "update"), ("_values", "update")]
MOVED = [("_keys", "reorder"), ("_values", "reorder")]
READ_BY = {"static": MOVED, "rolling": [*MOVED, ("_lost", "reset"), ("_lost", "mask")]}
READ_BY["paged"] = [("table", call) for call in ("reset", "update", "gathered")] + [("lengths", "gathered")]
NEW = torch.randn(2, 1, 1, 4)
GIVEN_TO = {"positions": (1,), "mask": (1,), "update": (NEW, NEW), "reorder": ([1, 0],), "truncate": (0,)}


@pytest.mark.parametrize("kind", CACHES)
def test_buffers_of_a_cache(kind: str) -> None:
    for name, call in READ + READ_BY[kind]:
        cache = CACHES[kind]()
        if kind == "paged":
            cache.reserve([2, 2])
        _shrink(getattr(cache, name), 0)
        with pytest.raises(OPERATOR_ERROR, match=r"cache.*: expected a storage of \d+ bytes .* got 0 bytes"):
            getattr(cache, call)(*GIVEN_TO.get(call, ()))


def test_views_of_a_part_are_measured_from_where_they_begin() -> None:
    x = torch.randn(3, 1, 2, 20, 16)
    q, k, v = x
    whole = attention(q, k, v)
    x.untyped_storage().resize_(2 * 4 * 640)  # q and k stay whole
    assert torch.isfinite(attention(q, k, k)).all()
    with pytest.raises(OPERATOR_ERROR, match=REFUSED):
        attention(q, k, v)
    assert whole.isfinite().all()
