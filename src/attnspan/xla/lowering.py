"""Lowering of a mask and options to bounds and indices on XLA devices, each split as its spec says."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import TorchArrays, arrays_for, is_array, is_bool, is_integer
from attnspan.call import check_k_len, lower_mask
from attnspan.call.options import Bias, Given
from attnspan.errors import DeviceError, DtypeError, OptionError, expect
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans

from .ops import lower_op, place_op
from .places import Places, check_spec, default_spec, mesh_of, spec_text
from .recipe import OpaqueError, encode

#: Partition specs, keyed by the names of arguments.
Specs = Mapping[str, tuple[Any, ...]]

#: Keywords of options that are tensors.
_OPTIONS = ("sinks", "dropout_seed", "q_index", "k_index")


def lower_all(
    mask: Any, q: Tensor, k: Tensor, given: Given, places: Places | None, specs: Specs
) -> tuple[Given, Prepared]:
    """Lower the mask of a call, after its tensors and the options' tensors are placed.

    ``places`` says how q is split. ``specs``, keyed by name, override the specs that follow from q's spec.
    Returns the options with placed tensors, and the mask as bounds with indices.
    """
    words, arrays, names = _worded(mask)
    _check_names(specs, places, [*names, *_names(given)])
    given = _place_options(given, places, specs)
    if words == "":
        return given, lower_mask(mask, q, k, given, like=q)
    arrays = [_moved(x, name, q) for x, name in zip(arrays, names, strict=True)]
    if places is not None:
        arrays = [
            _place(x, specs.get(name) or default_spec(x, places, name, q.shape[0], q.shape[1]), name, places)
            for x, name in zip(arrays, names, strict=True)
        ]
    if isinstance(mask, (Prepared, Spans)):
        return given, _fitting(mask, dict(zip(names, arrays, strict=True)), k.shape[2])
    return given, _lower(words, arrays, q, k, given)


def _worded(mask: Any) -> tuple[str, list[Any], list[str]]:
    """Return the mask in words. A mask with a function has none, because it needs XLA tensors."""
    if isinstance(mask, (Prepared, Spans)):
        named = {"bounds": mask.bounds if isinstance(mask, Spans) else mask.lowered.bounds}
        if not isinstance(mask, Spans):
            named.update(q_index=mask.q_index, k_index=mask.k_index)
        names = [name for name in named if named[name] is not None]
        return "lowered", [named[name] for name in names], names
    try:
        return encode(mask)
    except OpaqueError:
        return "", [], []


def _lower(words: str, arrays: list[Tensor], q: Tensor, k: Tensor, given: Given) -> Prepared:
    q_len, k_len = q.shape[2], k.shape[2]
    indices = [_moved(getattr(given, name), name, q) for name in ("q_index", "k_index")]
    # An operator without tensors has no device.
    arrays = arrays or [torch.zeros((), dtype=torch.int32, device=q.device)]
    bounds, *others = lower_op(arrays, words, [q_len, k_len, q.shape[0], q.shape[1]], *indices)
    k_index = None if given.k_index is None else others.pop()
    return Prepared(Spans(bounds, k_len), others[0] if others else None, k_index)


def _fitting(mask: Any, arrays: dict[str, Tensor], k_len: int) -> Prepared:
    """Return a lowered mask with its arrays placed."""
    lowered = mask if isinstance(mask, Spans) else mask.lowered
    check_k_len(lowered.k_len, k_len)
    bare = isinstance(mask, Spans) or mask.bare
    return Prepared(Spans(arrays["bounds"], k_len), arrays.get("q_index"), arrays.get("k_index"), bare)


def _moved(x: Any, name: str, q: Tensor) -> Any:
    """Return an array as an XLA tensor of a dtype that JAX has without 64 bits. Leave other values."""
    if isinstance(x, Tensor) and x.device != q.device:
        wanted, remedy = f"device {q.device} (as q)", 'Move it with .to("xla")'
        raise DeviceError(name, expected=wanted, got=str(x.device), remedy=remedy)
    if not isinstance(x, (Tensor, np.ndarray)):
        if is_array(x):
            wanted, got = "an XLA tensor or a NumPy array", f"an array of {arrays_for([x]).name}"
            remedy = 'Convert it with torch.from_dlpack, and move it with .to("xla")'
            raise DtypeError(f"mask: {name}", expected=wanted, got=got, remedy=remedy)
        return x
    if is_integer(x):
        return TorchArrays(q.device).to_int32(x)
    return torch.as_tensor(x, device=q.device) if is_bool(x) else x


def _fields(bias: Any) -> list[str]:
    """Return the names of a bias's fields, if it has any."""
    return [field.name for field in fields(bias)] if isinstance(bias, Bias) else []  # type: ignore[arg-type]


def _names(given: Given) -> list[str]:
    """Return the names of the tensors among the options."""
    found = [name for name in _OPTIONS if getattr(given, name) is not None]
    found += ["bias"] if isinstance(given.bias, Tensor) else []
    return found + [name for name in _fields(given.bias) if isinstance(getattr(given.bias, name), Tensor)]


def _check_names(specs: Specs, places: Places | None, known: list[str]) -> None:
    """Raise for specs of tensors that the call does not have, and for specs without a spec of q."""
    fits, remedy = not specs or places is not None, "Pass q's partition_spec first"
    expect(fits, "specs", "partition_spec in the same call", "None", remedy)
    for name in specs:
        if name not in known:
            wanted = f"tensors of this call ({', '.join(known) or 'it has none other than q, k, v'})"
            remedy = "Use the name of an array of the mask or the bias, or an option's keyword"
            raise OptionError("specs", expected=wanted, got=f"{name!r}", remedy=remedy)


def _place_options(given: Given, places: Places | None, specs: Specs) -> Given:
    """Return the options, placed if they have specs. Without specs, they follow q when they are used."""
    if places is None or not specs:
        return given

    def placed(x: Any, names: Any) -> dict[str, Any]:
        return {name: _place(getattr(x, name), specs[name], name, places) for name in names if name in specs}

    bias = given.bias
    if isinstance(bias, Bias):
        bias = replace(bias, **placed(bias, _fields(bias)))  # type: ignore[type-var]
        return given.replacing(bias=bias, **placed(given, _OPTIONS))
    return given.replacing(**placed(given, (*_OPTIONS, "bias")))


def _place(x: Any, spec: Any, name: str, places: Places) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    check_spec(f"specs: {name}", spec, x.dim(), mesh_of(places.key))
    return place_op(x, places.key, spec_text(spec))
