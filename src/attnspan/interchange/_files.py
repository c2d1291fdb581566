"""Masks in files, and functions that make masks, for `python -m attnspan show`. A file cannot run code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from attnspan.base.arrays import arrays_for, is_array
from attnspan.errors import DtypeError, OptionError, expect
from attnspan.masks import Mask, Spans, from_dense, spans

from ._flashmask import from_flashmask, to_flashmask
from ._ranges import from_ranges, to_ranges
from ._serving import from_bits
from ._varlen import from_varlen, to_varlen

Host = np.ndarray[Any, Any]
_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_KNOWN = (
    "booleans, bounds of spans (B, H, q_len, R, 2), startend_row_indices (B, H, k_len, 1, 2 or 4), "
    "offsets of documents, or arrays named q_ranges, k_ranges, types, or packed, "
    "qo_indptr, kv_indptr, or cu_seqlens_q"
)


class Found(NamedTuple):
    """A mask of a file or a function, its format, and the sizes that it implies."""

    mask: Mask
    kind: str
    q_len: int | None = None
    k_len: int | None = None
    batch: int = 1
    heads: int = 1


def find(text: str, causal: bool | None) -> Found | None:
    """Return the mask in a file, or the mask that `module:function` makes. None if the text is neither."""
    function = _FUNCTION.fullmatch(text)
    if function is not None:
        return _called(*function.groups())
    path = Path(text)
    load = _LOADERS.get(path.suffix)
    return None if load is None else _of_arrays(load(path), causal)


def _called(module: str, name: str) -> Found:
    what, remedy = f"{module}:{name}", "Name a function without arguments that returns a mask"
    fn = getattr(import_module(module), name, None)
    expect(callable(fn), what, "a function", type(fn).__name__, remedy)
    mask = fn()  # type: ignore[misc]
    expect(isinstance(mask, Mask), what, "a mask", type(mask).__name__, remedy, error=DtypeError)
    return Found(mask, f"mask of {what}")


def _numpy(path: Path) -> dict[str, Host]:
    try:
        found = np.load(path, allow_pickle=False)
        return {"": found} if isinstance(found, np.ndarray) else dict(found)
    except (ValueError, EOFError, BadZipFile):
        raise _unreadable(path, "np.save or np.savez") from None


def _safetensors(path: Path) -> dict[str, Host]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except SafetensorError:
        raise _unreadable(path, "safetensors") from None


def _pickled(path: Path) -> dict[str, Host]:
    import pickle

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise _unreadable(path, "torch.save") from None
    named = found if isinstance(found, Mapping) else {"": found}
    holds, remedy = all(map(is_array, named.values())), "Save a tensor, or a dict of tensors"
    expect(holds, str(path), "tensors", "other objects", remedy, error=DtypeError)
    return {name: x.numpy() for name, x in named.items()}


def _unreadable(path: Path, writer: str) -> OptionError:
    remedy = f"Save arrays of numbers or booleans with {writer}. Other objects could run code"
    got = "other objects, or a broken file"
    return OptionError(str(path), expected="arrays", got=got, remedy=remedy)


_LOADERS: dict[str, Callable[[Path], dict[str, Host]]] = {
    ".npy": _numpy,
    ".npz": _numpy,
    ".pt": _pickled,
    ".safetensors": _safetensors,
}


def _of_arrays(arrays: dict[str, Host], causal: bool | None) -> Found:
    names = set(arrays)
    if {"q_ranges", "k_ranges", "types"} <= names:
        ends = arrays["q_ranges"], arrays["k_ranges"]
        sizes = (int(x.max(initial=0)) for x in ends)
        return Found(from_ranges(*ends, arrays["types"]), "ranges of MagiAttention", *sizes)
    if {"packed", "qo_indptr", "kv_indptr"} <= names:
        q, k = arrays["qo_indptr"], arrays["kv_indptr"]
        mask = from_bits(arrays["packed"], q, k, arrays.get("indptr"))
        return Found(mask, "bits of FlashInfer", int(q[-1]), int(k[-1]))
    if "cu_seqlens_q" in names:
        return _offsets(arrays["cu_seqlens_q"], arrays.get("cu_seqlens_k"), causal)
    got = ", ".join(f"{name} {x.dtype}{list(x.shape)}".strip() for name, x in arrays.items())
    expect(len(arrays) == 1, "show", _KNOWN, got or "no arrays", "Write one mask to a file")
    (x,) = arrays.values()
    read = _single(x, causal)
    if read is None:
        raise OptionError("show", expected=_KNOWN, got=got, remedy="Write the mask in one of these formats")
    return read


def _single(x: Host, causal: bool | None) -> Found | None:
    if x.dtype == np.bool_ and x.ndim in (2, 3, 4):
        batch, heads = (1, 1, *x.shape)[-4:-2] if x.ndim != 3 else (len(x), 1)
        q_len, k_len = x.shape[-2:]
        return Found(from_dense(x), "booleans", q_len, k_len, batch, heads)
    if x.dtype.kind not in "iu":
        return None
    if x.ndim == 5 and x.shape[-1] == 2:
        batch, heads, q_len = x.shape[:3]
        return Found(spans(x), "spans", q_len, max(q_len, int(x.max(initial=0))), batch, heads)
    if x.ndim == 4 and x.shape[-1] in (1, 2, 4):
        known, remedy = causal is not None or x.shape[-1] != 2, "Pass --causal or --no-causal"
        expect(known, "show", "--causal or --no-causal for FlashMask with two numbers", "neither", remedy)
        causal = x.shape[-1] == 1 if causal is None else causal
        mask = from_flashmask(x, causal)
        return Found(mask, f"FlashMask, causal={causal}", x.shape[2], x.shape[2], *x.shape[:2])
    return _offsets(x, None, causal) if x.ndim == 1 else None


def _offsets(cu_q: Host, cu_k: Host | None, causal: bool | None) -> Found:
    mask = from_varlen(cu_q, cu_k, causal=bool(causal))
    ends = int(cu_q.max(initial=0)), int((cu_q if cu_k is None else cu_k).max(initial=0))
    return Found(mask, f"offsets of documents, causal={bool(causal)}", *ends)


def report(found: Spans) -> str:
    """Describe the cost of a mask in blocks of 128 x 128, and the libraries that can run it."""
    bounds = arrays_for([found.bounds]).to_numpy(found.bounds)
    lowered = Spans(bounds, found.k_len).validate()
    q_len, k_len = lowered.q_len, lowered.k_len
    tiles = np.asarray(lowered.block_states(128, 128)) > 0
    visible = int(np.asarray(lowered.cost()).sum())
    computed = int(tiles.sum()) * 128 * 128
    lines = {
        "tiles": f"{int(tiles.sum()):,} of {tiles.size:,} blocks of 128 x 128 have a visible pair: "
        f"{computed / max(visible, 1):.2f} computed pairs for each visible pair",
        "FlexAttention": "yes, by attnspan.torch.to_block_mask",
        "SDPA": f"yes, by to_dense: {bounds.shape[0] * bounds.shape[1] * q_len * k_len:,} bytes",
        "flash-attn": _writes(
            lambda: f"{len(to_varlen(lowered, q_len, k_len)[0]) - 1} documents, by to_varlen"
        ),
        "FlashMask": _writes(lambda: _flashmask(lowered)),
        "MagiAttention": _writes(
            lambda: f"{len(to_ranges(lowered, q_len, k_len).types)} ranges, by to_ranges"
        ),
    }
    return "\n".join(f"{name:<13} {text}" for name, text in lines.items())


def _flashmask(found: Spans) -> str:
    batch, heads = found.bounds.shape[:2]
    numbers, causal = to_flashmask(found, found.q_len, found.k_len, batch=batch, heads=heads)
    n = numbers.shape[-1]
    return f"{n} number{'s' * (n > 1)} for each key, causal={causal}, by to_flashmask"


def _writes(write: Callable[[], str]) -> str:
    try:
        return f"yes, {write()}"
    except OptionError as error:
        return f"no, {str(error).partition(': expected ')[2].partition('. ')[0]}".replace(
            "no, ", "no: expected "
        )
