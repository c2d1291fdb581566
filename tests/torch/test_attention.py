"""The public call: layouts, autocast, options, messages, the choice of the backend."""

import math
import re
import warnings

import pytest
import torch
from closeness import relative_error
from samples import MASKS, make_sample, oracle
from torch import Tensor

import attnspan
from attnspan import (
    Mask,
    Spans,
    cache,
    causal,
    documents,
    full,
    key_padding,
    keys,
    library,
    prefix,
    segments,
)
from attnspan.kernels import cpu
from attnspan.torch import Attention, SlowPathWarning, attention, explain
from attnspan.torch import _attention as private


def _qkv(**options: object) -> tuple[Tensor, Tensor, Tensor]:
    sample = make_sample(**{"q_len": 24, "k_len": 24, "v_dim": 24, **options})  # type: ignore[arg-type]
    return sample.q, sample.k, sample.v


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_against_the_oracle(name: str) -> None:
    q, k, v = _qkv()
    mask = MASKS[name]()
    bounds = mask.spans(24, 24, batch=2, heads=4, like=q).bounds
    dout = torch.randn(2, 4, 24, 24)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sample = make_sample()
    sample.q, sample.k, sample.v, sample.bounds, sample.scale = q, k, v, bounds, 0.25
    exact_out, _, *exact = oracle(sample, dout)
    out = attention(q, k, v, mask=mask)
    # 24 keys, then 16 or 24 products each: a few roundings beyond one.
    bound = 24 * torch.finfo(torch.float32).eps
    assert relative_error(out, exact_out) <= bound
    for got, true in zip(torch.autograd.grad(out, (q, k, v), dout), exact, strict=True):
        assert relative_error(got, true) <= bound


def test_layouts_agree() -> None:
    q, k, v = _qkv(batch=1)
    mask = causal() & documents(torch.tensor([0, 10, 24]))
    wanted, wanted_lse = attention(q, k, v, mask=mask, return_lse=True)
    flipped = [x.transpose(1, 2) for x in (q, k, v)]
    bshd, lse = attention(*flipped, mask=mask, layout="bshd", return_lse=True)
    assert torch.equal(bshd.transpose(1, 2), wanted)
    assert torch.equal(lse, wanted_lse)
    assert bshd.is_contiguous()
    packed, lse = attention(*(x[0] for x in flipped), mask=mask, layout="thd", return_lse=True)
    assert torch.equal(packed, bshd[0])
    assert torch.equal(lse, wanted_lse[0])
    apart = [
        attention(q[:, :, s], k[:, :, s], v[:, :, s], mask=causal()) for s in (slice(0, 10), slice(10, 24))
    ]
    torch.testing.assert_close(torch.cat(apart, 2), wanted)


def test_indices() -> None:
    q, k, v = _qkv()
    whole = attention(q, k, v, mask=causal())
    rows = torch.tensor([3, 11, 20])
    torch.testing.assert_close(attention(q[:, :, rows], k, v, mask=causal(), q_index=rows), whole[:, :, rows])
    keys = torch.arange(0, 24, 2)
    some = attention(q, k[:, :, keys], v[:, :, keys], mask=causal(), q_index=torch.arange(24), k_index=keys)
    dense = (torch.arange(24)[:, None] >= keys)[None, None]
    torch.testing.assert_close(
        some, attention(q, k[:, :, keys], v[:, :, keys], mask=attnspan.from_dense(dense))
    )
    torch.testing.assert_close(attention(q[:, :, -5:], k, v, mask=causal()), whole[:, :, -5:])


def test_lowered_masks_are_taken() -> None:
    q, k, v = _qkv()
    wanted = attention(q, k, v, mask=causal())
    assert torch.equal(attention(q, k, v, mask=causal().prepare(24, 24, like=q)), wanted)
    assert torch.equal(attention(q, k, v, mask=causal().spans(24, 24)), wanted)  # NumPy bounds


def test_autocast_casts_as_torch_does() -> None:
    q, k, v = _qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention(q, k, v.half(), mask=causal())
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q, k, v.half(), is_causal=True, enable_gqa=True
        )
        math_path = attention(q, k, v, mask=causal(), backend="math")
        kept = attention(*(x.double() for x in (q, k, v)), backend="math")
    assert ours.dtype == theirs.dtype == math_path.dtype == torch.bfloat16
    assert kept.dtype == torch.float64
    plain = attention(*(x.bfloat16() for x in (q, k, v.half())), mask=causal())
    assert torch.equal(ours, plain)


def test_the_module_is_the_function() -> None:
    q, k, v = _qkv()
    layer = Attention(mask=causal(), scale=0.3)
    assert torch.equal(layer(q, k, v), attention(q, k, v, mask=causal(), scale=0.3))
    assert torch.equal(layer(q, k, v, full()), attention(q, k, v, scale=0.3))
    assert "scale=0.3" in repr(layer)


BAD = {
    "rank": ({"q": (2, 4, 16)}, ValueError, r"q: expected 4 dims .* got \(2, 4, 16\)"),
    "layout": ({"layout": "sbhd"}, ValueError, "layout: expected one of bhsd, bshd, thd, got 'sbhd'"),
    "batch": ({"k": (3, 2, 9, 16), "v": (3, 2, 9, 16)}, ValueError, "batch: expected the same batch size"),
    "head_dim": ({"k": (2, 2, 9, 8)}, ValueError, "head_dim: expected the same for q and k"),
    "k and v heads": ({"v": (2, 4, 9, 16)}, ValueError, "expected as many value as key heads"),
    "k and v length": ({"v": (2, 2, 8, 16)}, ValueError, "expected as many values as keys"),
    "groups": ({"q": (2, 3, 7, 16)}, ValueError, "heads: expected a multiple of the key heads"),
    "no heads": ({"q": (2, 0, 7, 16)}, ValueError, "expected at least one query and one key head"),
    "no key heads": (
        {"k": (2, 0, 9, 16), "v": (2, 0, 9, 16)},
        ValueError,
        "at least one query and one key head",
    ),
    "no head_dim": (
        {"q": (2, 4, 7, 0), "k": (2, 2, 9, 0)},
        ValueError,
        "head_dim: expected at least one element",
    ),
    "scale nan": ({"scale": math.nan}, ValueError, "scale: expected a finite float32 number, got nan"),
    "scale inf": ({"scale": -math.inf}, ValueError, "scale: expected a finite float32 number, got -inf"),
    "scale beyond float32": (
        {"scale": 1e300},
        ValueError,
        "scale: expected a finite float32 number, got 1e\\+300",
    ),
    "scale tensor": ({"scale": torch.tensor(1.0)}, TypeError, "scale: expected a Python number, got Tensor"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: expected None or one of cpu, math, got 'cuda'"),
    "mask": (
        {"mask": torch.ones(7, 9)},
        TypeError,
        "mask: expected a mask expression.*got Tensor.*from_dense",
    ),
    "indices twice": (
        {"mask": causal().prepare(7, 9), "q_index": torch.arange(7)},
        ValueError,
        "q_index, k_index: expected None with a mask that is already lowered and no option",
    ),
    "spans of other keys": ({"mask": causal().spans(7, 8)}, ValueError, "expected spans over k_len=9 keys"),
    "spans of other queries": (
        {"mask": causal().spans(6, 9)},
        ValueError,
        r"bounds: expected .*q_len=7, got \(",
    ),
    "spans of another batch": (
        {"mask": Spans(torch.zeros(3, 1, 7, 1, 2, dtype=torch.int32), 9)},
        ValueError,
        r"bounds: expected \(B\|1, H\|1, q_len, R, 2\) with B=2",
    ),
    "no spans": (
        {"mask": Spans(torch.zeros(1, 1, 7, 0, 2, dtype=torch.int32), 9)},
        ValueError,
        "bounds: expected",
    ),
    "long bounds": (
        {"mask": Spans(torch.zeros(1, 1, 7, 1, 2, dtype=torch.int64), 9)},
        TypeError,
        "bounds: expected int32, got int64",
    ),
    "bounds elsewhere": (
        {"mask": Spans(torch.zeros(1, 1, 7, 1, 2, dtype=torch.int32, device="meta"), 9)},
        ValueError,
        "bounds: expected device cpu",
    ),
    "packed, unseparated": (
        {"q": (7, 4, 16), "k": (9, 2, 16), "v": (9, 2, 16), "layout": "thd", "mask": causal()},
        ValueError,
        r"keeps packed documents apart, got causal\(\)",
    ),
    "layout of another kind": ({"layout": ["bhsd"]}, ValueError, "layout: expected one of bhsd, bshd, thd"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_how_and_why(name: str) -> None:
    changes, kind, message = BAD[name]
    options = dict(changes)
    q, k, v = (
        torch.randn(options.pop(x, shape))
        for x, shape in (("q", (2, 4, 7, 16)), ("k", (2, 2, 9, 16)), ("v", (2, 2, 9, 16)))
    )
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)) as caught:
        attention(q, k, v, **options)
    assert str(caught.value).count(", got ") + str(caught.value).count("; got ") >= 1
    assert str(caught.value).endswith(".")


CU = torch.tensor([0, 3, 8])
BLIND = [
    key_padding(8) & causal(),
    keys(torch.ones(8, dtype=torch.bool)) & causal(),
    cache(8) & causal(),
    prefix(2) | causal(),
    causal() | documents(CU),
]


@pytest.mark.parametrize("mask", BLIND, ids=repr)
def test_packed_documents_that_see_each_other_are_refused(mask: Mask) -> None:
    x = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match=r"keeps packed documents apart.*Combine it by & with documents"):
        attention(x, x, x, mask=mask, layout="thd")
    assert attention(x, x, x, mask=mask & documents(CU), layout="thd").shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_strides_are_refused() -> None:
    parts, q = [torch.randn(4, 8, 16), torch.randn(4, 5, 16)], torch.randn(2, 4, 8, 16)
    jagged = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=torch.jagged)
    for nested in (torch.nested.nested_tensor(parts), jagged):
        with pytest.raises(TypeError, match=r"q: .* got a nested tensor. Pass x.values\(\) .*documents"):
            attention(nested, nested, nested)
    with pytest.raises(TypeError, match=r"k: expected a dense tensor, got one of torch.sparse_coo"):
        attention(q, q.to_sparse(), q)


def test_bad_dtypes_and_devices() -> None:
    q, k, v = _qkv()
    with pytest.raises(TypeError, match="expected one dtype, got float32, bfloat16, float32"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(TypeError, match=r"q: expected a floating dtype .* got int64"):
        attention(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match="expected one device, got cpu, meta, cpu"):
        attention(q, k.to("meta"), v)


def test_lengths_beyond_the_kernels() -> None:
    k = torch.empty(1, device="meta").expand(1, 1, 2**31 - 64, 8)
    with pytest.raises(ValueError, match="k_len: expected at most 2147483583"):
        attention(torch.empty(1, 1, 1, 8, device="meta"), k, k)


def test_a_kernel_that_cannot_says_so() -> None:
    x = torch.randn(1, 1, 4, 264)
    with pytest.raises(ValueError, match="up to 256, not 264"):
        attention(x, x, x, backend="cpu")


def test_a_slow_path_warns_once_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_warned", set())
    x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with pytest.warns(SlowPathWarning, match="'cpu' refused .*not float64"):
        attention(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(x, x, x)
        attention(x, x, x, backend="math")
    monkeypatch.setattr(cpu, "core", None)
    with pytest.warns(SlowPathWarning, match=r"attnspan\._core is missing .*build it"):
        attention(x.float(), x.float(), x.float())
    with pytest.raises(ValueError, match=r"attnspan\._core is missing"):
        attention(x.float(), x.float(), x.float(), backend="cpu")


def test_explain() -> None:
    q, k, v = _qkv()
    found = explain(q, k, v, mask=causal() & segments(torch.arange(24) // 6))
    assert (found.backend, found.problem.runs, found.pairs) == ("cpu", 1, 2 * 4 * 4 * 21)
    assert found.coverage == found.pairs / (2 * 4 * 24 * 24)
    assert found.flops == 2 * found.pairs * (16 + 24)
    text = str(found)
    for part in ("runs     cpu", cpu.isa(), "math: slower than cpu", "R=1", "672 visible pairs", "14.6%"):
        assert part in text
    other = explain(q.double(), k.double(), v.double(), layout="bhsd")
    assert (other.backend, other.isa) == ("math", None)
    assert "not float64" in other.refusals["cpu"]
    assert explain(q, k, v, backend="math").refusals["cpu"] == "not asked for"


def test_what_is_no_tensor_is_named() -> None:
    q, k, v = _qkv()
    with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got str"):
        attention("q", k, v)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"k: expected a torch\.Tensor, got ndarray"):
        attention(q, k.numpy(), v)


def test_packed_layout_takes_masks_that_keep_documents_apart_without_arrays() -> None:
    q = torch.randn(8, 2, 16)
    apart = attention(q, q, q, mask=library.batchify(causal(), 4), layout="thd")
    wanted = attention(q, q, q, mask=causal() & documents(torch.tensor([0, 4, 8])), layout="thd")
    torch.testing.assert_close(apart, wanted)
