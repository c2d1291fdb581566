"""Masks that eager calls lower once: when they are remembered, and that memory never lies."""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples.library import LIBRARY
from samples.masks import BATCH, SAMPLES
from torch import Tensor

from attnspan import Prepared, Spans, causal, from_predicate, segments, window
from attnspan.call.options import NO_OPTIONS
from attnspan.torch import _front, attention
from attnspan.torch._lowered import _memory, lowered

S = 16


def _qkv(q_len: int = S) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, q_len, 8), torch.randn(2, 4, S, 8), torch.randn(2, 4, S, 8)


def _ids() -> Tensor:
    return (torch.arange(S) // 5).repeat(2, 1)


def _write(ids: Any) -> None:
    ids[1, 3:] = 9


WRITES: dict[str, Callable[[Tensor], None]] = {
    "in place": _write,
    "through data": lambda ids: _write(ids.data),
    "through NumPy": lambda ids: _write(ids.numpy()),
    "through a view": lambda ids: _write(ids.view(2, S)),
    "copy_": lambda ids: ids.copy_(_ids().flip(1)),
}


@pytest.mark.parametrize("kind", ["torch", "numpy", "inference"])
@pytest.mark.parametrize("write", WRITES)
def test_writing_into_the_ids_lowers_again(write: str, kind: str) -> None:
    q, k, v = _qkv()
    with torch.inference_mode(kind == "inference"):  # whose tensors have no version
        ids = _ids()
        mask = causal() & segments(ids.numpy() if kind == "numpy" else ids)
        attention(q, k, v, mask=mask)
        WRITES[write](ids)
    again = attention(q.requires_grad_(), k, v, mask=mask)
    assert torch.equal(again, attention(q, k, v, mask=causal() & segments(ids.clone())))
    assert not torch.equal(again, attention(q, k, v, mask=causal() & segments(_ids())))
    again.sum().backward()


def _as_uint32(ids: Any) -> None:
    ids.dtype = np.uint32  # the same bytes


def _as_int32(ids: Any) -> None:
    ids.data = ids.data.int()


def test_ids_of_another_dtype_are_lowered_again() -> None:
    q, k, _ = _qkv()
    for ids, change in ((_ids(), _as_int32), (np.full((2, S), -1, np.int32), _as_uint32)):
        mask = segments(ids)
        first = lowered(mask, q, k)
        change(ids)
        assert lowered(mask, q, k) is not first


def test_a_mask_prepared_in_numpy() -> None:
    q, k, v = _qkv()
    mask = (causal() & segments(_ids().numpy())).prepare(S, S, batch=2)
    wanted = attention(q, k, v, mask=causal() & segments(_ids()))
    for _ in range(2):
        assert torch.equal(attention(q, k, v, mask=mask), wanted)
    torch.testing.assert_close(attention(q, k, v, mask=mask, backend="math"), wanted)
    own = Prepared(Spans(mask.lowered.bounds.copy(), S))
    assert torch.equal(attention(q, k, v, mask=own), wanted)
    own.lowered.bounds[..., 3, :, :] = 0  # a row that sees nothing
    assert (attention(q, k, v, mask=own)[:, :, 3] == 0).all()


def test_what_a_function_reads_cannot_be_known() -> None:
    q, k, v = _qkv()
    limit = torch.tensor(3)
    mask = from_predicate(lambda b, h, i, j: j < limit)  # noqa: ARG005
    before = attention(q, k, v, mask=mask)
    limit.fill_(5)
    assert not torch.equal(before, attention(q, k, v, mask=mask))


def test_memory_is_bounded_and_dies_with_the_mask() -> None:
    q, k, v = _qkv()
    mask, size = causal() & segments(_ids()), len(pickle.dumps(causal() & segments(_ids())))
    for q_len in range(1, S):
        attention(q[:, :, :q_len], k, v, mask=mask)
    assert len(_memory._masks[id(mask)][1]) == 4
    assert len(pickle.dumps(mask)) == size
    assert lowered(copy.deepcopy(mask), q, k) is not lowered(mask, q, k)
    gc.collect()  # masks of other tests
    before, alive = len(_memory), weakref.ref(mask)
    del mask
    gc.collect()
    assert alive() is None
    assert len(_memory) == before - 1


@pytest.mark.parametrize("sample", [*SAMPLES, *LIBRARY], ids=lambda sample: sample.name)
def test_it_is_what_the_general_way_lowers(sample: Any) -> None:
    for q_len, convert in ((sample.keys, torch.from_numpy), (7, np.asarray), (1, torch.from_numpy)):
        mask = sample.mask(convert)
        q, k = torch.zeros(BATCH, 4, q_len, 8), torch.zeros(BATCH, 4, sample.keys, 8)
        found = lowered(mask, q, k)
        if found is None:  # a function, blocks, or rows that do not fit
            continue
        wanted = mask.spans(q_len, sample.keys, batch=BATCH, heads=4, like=q)
        assert torch.equal(found.lowered.dense(), wanted.lowered.dense())
        assert (found.q_index is None) == (wanted.q_index is None)
        if wanted.q_index is not None:
            assert torch.equal(found.q_index, wanted.q_index)


def test_nothing_is_remembered_of_a_cuda_graph_and_nothing_is_lent_to_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(_front, "is_captured", lambda _: True)
    mask, (q, k, v) = causal() & segments(_ids()), _qkv()
    attention(q, k, v, mask=mask, backend="math")
    assert id(mask) not in _memory._masks
    assert not _front._may_remember(NO_OPTIONS, q)


def _calls_of_ours(function: Callable[[], object]) -> int:
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        del arg
        nonlocal count
        code = frame.f_code
        # Comprehensions are calls up to Python 3.11 only.
        count += event == "call" and "/attnspan/" in code.co_filename and code.co_name not in COMPREHENSIONS

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}

#: A mask without arrays is made anew for each call.
MASKS: dict[str, Callable[[], Any]] = {
    "no mask": lambda: None,
    "causal": causal,
    "causal & window": lambda: causal() & window(3),
    "prepared": lambda: (causal() & segments(_ids())).prepare(S, S, batch=2),
    "causal & segments": lambda: causal() & segments(_ids()),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("name", MASKS)
def test_few_python_calls_stand_before_the_kernel(name: str, options: Any, gradient: bool) -> None:
    q, k, v = (x.requires_grad_(gradient) for x in _qkv())
    mask = MASKS[name]()
    if name == "causal & segments":
        assert _calls_of_ours(lambda: attention(q, k, v, mask=mask, **options)) <= 76 + 4 * len(options)
    # Layers that cast share what is remembered.
    with torch.autocast("cpu", torch.bfloat16):
        attention(q, k, v, mask=mask, **options)
    attention(q, k, v, mask=mask if "segments" in name else MASKS[name](), **options)
    assert _calls_of_ours(lambda: attention(q, k, v, mask=mask, **options)) <= 15
