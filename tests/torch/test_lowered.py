"""Masks that eager calls lower once: when they are remembered, and that memory never lies."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples.library import LIBRARY
from samples.masks import BATCH, SAMPLES
from torch import Tensor

from attnspan import Mask, Prepared, Spans, causal, from_predicate, segments, window
from attnspan.call.options import NO_OPTIONS
from attnspan.torch import _front, attention
from attnspan.torch._lowered import _memory, lowered

S = 16


def _qkv(q_len: int = S, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, heads, q_len, 8), torch.randn(2, heads, S, 8), torch.randn(2, heads, S, 8)


def _ids(batch: int = 2) -> Tensor:
    return (torch.arange(S) // 5).repeat(batch, 1)


def _visible(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    found = mask.spans(q.shape[2], k.shape[2], batch=q.shape[0], heads=q.shape[1], like=q)
    return found.dense()


def _known(mask: Mask) -> list[Any]:
    """What the memory holds of a mask."""
    kept = _memory._masks.get(id(mask))
    return kept[1] if kept is not None and kept[0]() is mask else []


def test_layers_share_one_lowering() -> None:
    q, k, _ = _qkv()
    mask = causal() & segments(_ids())
    first = lowered(mask, q, k)
    assert first is not None
    assert lowered(mask, q, k) is first
    assert lowered(mask, q[:1], k[:1]) is None  # two rows of ids for one of q: the general way says so
    short = lowered(mask, q[:, :, :3], k)
    assert short is not None
    assert short.lowered.q_len == 3
    assert lowered(mask, q, k) is first


def _write(ids: Any) -> None:
    ids[1, 3:] = 9


WRITES: dict[str, Callable[[Tensor], None]] = {
    "in place": _write,
    "through data": lambda ids: _write(ids.data),
    "through NumPy": lambda ids: _write(ids.numpy()),
    "through a view": lambda ids: _write(ids.view(2, S)),
    "copy_": lambda ids: ids.copy_(_ids().flip(1)),
}


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writing_into_the_ids_lowers_again(write: str, numpy: bool) -> None:
    q, k, v = _qkv()
    ids = _ids()
    mask = causal() & segments(ids.numpy() if numpy else ids)
    attention(q, k, v, mask=mask)
    WRITES[write](ids)
    again = attention(q, k, v, mask=mask)
    assert torch.equal(again, attention(q, k, v, mask=causal() & segments(ids.clone())))
    assert not torch.equal(again, attention(q, k, v, mask=causal() & segments(_ids())))


@pytest.mark.parametrize("write", ["numpy", "torch"])
def test_ids_of_another_dtype_are_lowered_again(write: str) -> None:
    q, k, _ = _qkv()
    ids: Any = _ids() if write == "torch" else np.full((2, S), -1, np.int32)
    mask = segments(ids)
    first = lowered(mask, q, k)
    assert lowered(mask, q, k) is first
    if write == "torch":
        ids.data = ids.data.int()
    else:
        ids.dtype = np.uint32  # the same bytes
    assert lowered(mask, q, k) is not first


def test_ids_of_inference_mode_have_no_version_and_are_compared() -> None:
    q, k, v = _qkv()
    with torch.inference_mode():
        ids = _ids()
        mask = causal() & segments(ids)
        attention(q, k, v, mask=mask)
        _write(ids)
        again = attention(q, k, v, mask=mask)
    wanted = attention(q.requires_grad_(), k, v, mask=causal() & segments(ids.clone()))
    assert torch.equal(again, wanted)
    wanted.sum().backward()


def test_a_mask_prepared_in_numpy() -> None:
    q, k, v = _qkv()
    mask = (causal() & segments(_ids().numpy())).prepare(S, S, batch=2)
    assert isinstance(mask.lowered.bounds, np.ndarray)
    wanted = attention(q, k, v, mask=causal() & segments(_ids()))
    assert torch.equal(attention(q, k, v, mask=mask), wanted)
    first = lowered(mask, q, k)
    assert torch.equal(
        attention(q, k, v, mask=mask, backend="math"), attention(q, k, v, mask=first, backend="math")
    )
    assert lowered(mask, q, k) is first
    own = Prepared(Spans(mask.lowered.bounds.copy(), S))
    assert torch.equal(attention(q, k, v, mask=own), wanted)
    own.lowered.bounds[..., 3, :, :] = 0  # a row that sees nothing
    assert (attention(q, k, v, mask=own)[:, :, 3] == 0).all()


def test_layers_share_a_lowering_under_autocast_and_a_profiler_too() -> None:
    q, k, v = _qkv()
    mask = causal() & segments(_ids())
    with torch.autocast("cpu", torch.bfloat16):
        attention(q, k, v, mask=mask)
    (known,) = _known(mask)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        attention(q, k, v, mask=mask)
    assert _known(mask)[0] is known


def test_what_a_function_reads_cannot_be_known() -> None:
    q, k, v = _qkv()
    limit = torch.tensor(3)
    mask = from_predicate(lambda b, h, i, j: j < limit)  # noqa: ARG005
    assert lowered(mask, q, k) is None
    before = attention(q, k, v, mask=mask)
    limit.fill_(5)
    assert not torch.equal(before, attention(q, k, v, mask=mask))


def test_memory_is_bounded_and_dies_with_the_mask() -> None:
    q, k, _ = _qkv()
    mask = causal() & segments(_ids())
    for q_len in range(1, S):
        lowered(mask, q[:, :, :q_len], k)
    assert len(_known(mask)) == 4
    gc.collect()  # masks of other tests
    before, alive = len(_memory), weakref.ref(mask)
    del mask
    gc.collect()
    assert alive() is None
    assert len(_memory) == before - 1


def test_a_copy_has_a_memory_of_its_own() -> None:
    q, k, _ = _qkv()
    mask = causal() & segments(_ids())
    size = len(pickle.dumps(mask))
    first = lowered(mask, q, k)
    assert len(pickle.dumps(mask)) == size
    assert lowered(copy.deepcopy(mask), q, k) is not first


@pytest.mark.parametrize("sample", [*SAMPLES, *LIBRARY], ids=lambda sample: sample.name)
@pytest.mark.parametrize("convert", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
def test_it_is_what_the_general_way_lowers(sample: Any, convert: Any) -> None:
    keys = sample.keys
    for q_len in (keys, 7, 1):
        mask = sample.mask(convert)
        q, k = torch.zeros(BATCH, 4, q_len, 8), torch.zeros(BATCH, 4, keys, 8)
        try:
            wanted = mask.spans(q_len, keys, batch=BATCH, heads=4, like=q)
        except ValueError:
            assert lowered(mask, q, k) is None
            continue
        found = lowered(mask, q, k)
        if found is None:  # a function, or blocks
            continue
        assert torch.equal(found.lowered.dense(), wanted.lowered.dense())
        assert (found.q_index is None) == (wanted.q_index is None)
        if wanted.q_index is not None:
            assert torch.equal(found.q_index, wanted.q_index)


def test_masks_without_data_are_lowered_once_however_often_they_are_made() -> None:
    q, k, _ = _qkv(7)
    assert lowered(causal() & window(3), q, k) is lowered(causal() & window(3), q, k)
    assert lowered(causal() & window(3), q, k) is not lowered(causal() & window(4), q, k)
    assert lowered(causal() & window(3), q, k) is not lowered(causal() | window(3), q, k)
    assert lowered(causal(), q, k) is not lowered(causal(), k, k)
    assert lowered(None, q, k) is None


def test_each_device_has_its_own() -> None:
    q, k, _ = (x.to("meta") for x in _qkv())
    found = lowered(causal(), q, k)
    assert found is lowered(causal(), q, k)
    assert found is not None
    assert found.lowered.bounds.is_meta
    assert lowered(causal(), *_qkv()[:2]) is not found


def test_nothing_is_remembered_of_a_cuda_graph_and_nothing_is_lent_to_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(_front, "is_captured", lambda _: True)
    mask, (q, k, v) = causal() & segments(_ids()), _qkv()
    attention(q, k, v, mask=mask, backend="math")
    assert not _known(mask)
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

MASKS: dict[str, Callable[[], Any]] = {
    "no mask": lambda: None,
    "causal": causal,
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
    attention(q, k, v, mask=mask, **options)
    assert _calls_of_ours(lambda: attention(q, k, v, mask=mask, **options)) <= 15


def test_threads_share_the_memory_of_masks_without_arrays() -> None:
    before, errors = sys.getswitchinterval(), []

    def decode(start: int) -> None:
        try:
            for n in range(400):
                k = torch.zeros(1, 1, 1 + (7 * n + start) % 97, 8)
                assert lowered(causal(), k[:, :, :1], k).lowered.k_len == k.shape[2]
        except Exception as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=decode, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
