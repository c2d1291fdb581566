"""The public call: layouts, indices, autocast, the module, the choice of the backend."""

import warnings
from typing import Any

import pytest
import torch
from samples.torch_calls import OPTIONS, qkv

import attnspan
from attnspan import causal, documents, full, library, segments
from attnspan.kernels import cpu
from attnspan.torch import Attention, SlowPathWarning, attention, explain
from attnspan.torch import choice as private


def test_indices() -> None:
    q, k, v = qkv()
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
    q, k, v = qkv()
    wanted = attention(q, k, v, mask=causal())
    assert torch.equal(attention(q, k, v, mask=causal().prepare(24, 24, like=q)), wanted)
    assert torch.equal(attention(q, k, v, mask=causal().spans(24, 24)), wanted)  # NumPy bounds


@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("option", ["none", "all"])
def test_layouts_agree(option: str, layout: Any, backend: str) -> None:
    q, k, v = qkv(batch=1)
    options = {
        "backend": backend,
        "mask": causal() & documents(torch.tensor([0, 10, 24])),
        "return_lse": True,
    }
    options |= OPTIONS["all"](1, 4, 24, 24) if option == "all" else {}
    wanted, wanted_lse = attention(q, k, v, **options)
    inputs = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = attention(*(x[0] if layout == "thd" else x for x in inputs), layout=layout, **options)
    assert out.is_contiguous()
    out, lse = (out[None], lse[None]) if layout == "thd" else (out, lse)
    assert torch.equal(out.transpose(1, 2), wanted)
    assert torch.equal(lse, wanted_lse)


def test_autocast_casts_as_torch_does_and_leaves_options_alone() -> None:
    q, k, v = qkv()
    options = {**OPTIONS["all"](2, 4, 24, 24), "bias": torch.randn(4, 24, 24)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, with_options = attention(q, k, v.half(), mask=causal()), attention(q, k, v, **options)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            q, k, v.half(), is_causal=True, enable_gqa=True
        )
        math_path = attention(q, k, v, mask=causal(), backend="math")
        kept = attention(*(x.double() for x in (q, k, v)), backend="math")
    assert ours.dtype == theirs.dtype == math_path.dtype == torch.bfloat16
    assert kept.dtype == torch.float64
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(ours, attention(*low[:2], v.half().bfloat16(), mask=causal()))
    assert torch.equal(with_options, attention(*low, **options))
    rough = attention(*low, **{**options, "bias": options["bias"].bfloat16()})
    assert not torch.equal(with_options, rough)


def test_the_module_is_the_function() -> None:
    q, k, v = qkv()
    layer = Attention(mask=causal(), scale=0.3)
    assert torch.equal(layer(q, k, v), attention(q, k, v, mask=causal(), scale=0.3))
    assert torch.equal(layer(q, k, v, full()), attention(q, k, v, scale=0.3))
    assert "scale=0.3" in repr(layer)
    none = {"dropout_p": 0.0, "dropout_seed": torch.tensor(11)}
    assert torch.equal(attention(q, k, v, **none), attention(q, k, v))


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
    with pytest.warns(SlowPathWarning, match=r"attnspan\._core is missing.*build it"):
        attention(x.float(), x.float(), x.float())
    with pytest.raises(ValueError, match=r"attnspan\._core is missing"):
        attention(x.float(), x.float(), x.float(), backend="cpu")


def test_explain() -> None:
    q, k, v = qkv()
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
    text = str(explain(q, k, v, **OPTIONS["all"](2, 4, 24, 24)))
    assert "options  softcap 1.5, bias relative(float32[4, 15]), sinks, dropout 0.3" in text
    assert "options" not in str(explain(q, k, v))
    assert "bias dense_bias(float32[24, 24])" in str(explain(q, k, v, bias=torch.zeros(24, 24)))
    with pytest.raises(ValueError, match="softcap"):
        explain(q, k, v, softcap=-1.0)


def test_packed_layout_takes_masks_that_keep_documents_apart_without_arrays() -> None:
    q = torch.randn(8, 2, 16)
    apart = attention(q, q, q, mask=library.batchify(causal(), 4), layout="thd")
    wanted = attention(q, q, q, mask=causal() & documents(torch.tensor([0, 4, 8])), layout="thd")
    torch.testing.assert_close(apart, wanted)
