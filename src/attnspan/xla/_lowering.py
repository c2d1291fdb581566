"""From a mask and options as given to bounds and indices on XLA devices, each where its spec says."""

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arrays import TorchArrays, arrays_for, is_array, is_bool, is_integer
from ..call import check_k_len, lower_mask
from ..errors import DeviceError, DtypeError, OptionError
from ..masks import Prepared
from ..options import Bias, Given
from ..spans import Spans
from ._ops import lower_op, place_op
from ._places import Places, check_spec, default_spec, mesh_of, spec_text
from ._recipe import Opaque, encode

Specs = Mapping[str, tuple[Any, ...]]

#: Options that are tensors, by their keywords.
_OPTIONS = ("sinks", "dropout_seed", "q_index", "k_index")


def lower_all(
    mask: Any, q: Tensor, k: Tensor, given: Given, places: Places | None, specs: Specs
) -> tuple[Given, Prepared]:
    """Lower the mask of a call, after its tensors and those of its options are where the specs say.

    Args:
        mask: A mask, prepared or not, or spans.
        q: Shape (B, H, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        given: The options.
        places: How q is split.
        specs: Specs by name, in place of those that follow from q's.

    Returns:
        The options with tensors in their places, and the mask as bounds with indices.

    Raises:
        OptionError: A spec does not fit, or has the name of no tensor of the call.
        DeviceError: An array of the mask is on another device.
    """
    words, arrays, names = _worded(mask)
    _check_names(specs, places, [*names, *_names(given)])
    given = _place_options(given, places, specs)
    if words == "":
        return given, lower_mask(mask, q, k, given, like=q)  # type: ignore[arg-type]
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
    """The mask in words, or no words where it holds a function: that one is called on XLA tensors."""
    if isinstance(mask, (Prepared, Spans)):
        bounds = mask.bounds if isinstance(mask, Spans) else mask.lowered.bounds
        indices = (None, None) if isinstance(mask, Spans) else (mask.q_index, mask.k_index)
        named = {"bounds": bounds, "q_index": indices[0], "k_index": indices[1]}
        names = [name for name in named if named[name] is not None]
        return "lowered", [named[name] for name in names], names
    try:
        return encode(mask)
    except Opaque:
        return "", [], []


def _lower(words: str, arrays: list[Tensor], q: Tensor, k: Tensor, given: Given) -> Prepared:
    q_len, k_len = q.shape[2], k.shape[2]
    indices = [
        x if x is None else _moved(x, name, q)
        for name, x in (("q_index", given.q_index), ("k_index", given.k_index))
    ]
    # An operator without tensors would have no device.
    arrays = arrays or [torch.zeros((), dtype=torch.int32, device=q.device)]
    bounds, *others = lower_op(arrays, words, [q_len, k_len, q.shape[0], q.shape[1]], *indices)
    k_index = None if given.k_index is None else others.pop()
    return Prepared(Spans(bounds, k_len), others[0] if others else None, k_index)


def _fitting(mask: Any, arrays: dict[str, Tensor], k_len: int) -> Prepared:
    """A lowered mask with its arrays in their places."""
    lowered = mask if isinstance(mask, Spans) else mask.lowered
    check_k_len(lowered.k_len, k_len)
    bare = isinstance(mask, Spans) or mask.bare
    return Prepared(Spans(arrays["bounds"], k_len), arrays.get("q_index"), arrays.get("k_index"), bare)


def _moved(x: Any, name: str, q: Tensor) -> Any:
    """An array as an XLA tensor of a dtype that JAX has without 64 bits; what is none is left as it is."""
    if isinstance(x, Tensor) and x.device != q.device:
        raise DeviceError(
            name, expected=f"device {q.device} (as q)", got=str(x.device), remedy='Move it by .to("xla")'
        )
    if not isinstance(x, (Tensor, np.ndarray)):
        if is_array(x):
            raise DtypeError(
                f"mask: {name}",
                expected="an XLA tensor, or an array of NumPy",
                got=f"one of {arrays_for([x]).name}",
                remedy='Convert it by torch.from_dlpack, and move it by .to("xla")',
            )
        return x
    if is_integer(x):
        return TorchArrays(q.device).to_int32(x)
    return torch.as_tensor(x, device=q.device) if is_bool(x) else x


def _names(given: Given) -> list[str]:
    """Names of the tensors among the options."""
    found = [name for name in _OPTIONS if getattr(given, name) is not None]
    if isinstance(given.bias, Tensor):
        found.append("bias")
    if isinstance(given.bias, Bias):
        found += [f.name for f in _fields(given.bias) if isinstance(getattr(given.bias, f.name), Tensor)]
    return found


def _fields(bias: Bias) -> tuple[Field[Any], ...]:
    return fields(bias)  # type: ignore[arg-type]


def _check_names(specs: Specs, places: Places | None, known: list[str]) -> None:
    """Raise for specs of tensors that the call does not have, and for specs without one of q."""
    if specs and places is None:
        raise OptionError(
            "specs", expected="partition_spec beside it", got="None", remedy="Pass q's partition_spec first"
        )
    for name in specs:
        if name not in known:
            raise OptionError(
                "specs",
                expected=f"tensors of this call ({', '.join(known) or 'it has none beside q, k, v'})",
                got=f"{name!r}",
                remedy="Name an array of the mask or the bias, or an option by its keyword",
            )


def _place_options(given: Given, places: Places | None, specs: Specs) -> Given:
    """The options, where specs of their own say; without, they follow q when they are used."""
    if places is None or not specs:
        return given
    bias = given.bias
    if isinstance(bias, Bias):
        named = {f.name: specs[f.name] for f in _fields(bias) if f.name in specs}
        bias = replace(
            bias,
            **{  # type: ignore[type-var]
                name: _place(getattr(bias, name), spec, name, places) for name, spec in named.items()
            },
        )
    elif "bias" in specs:
        bias = _place(bias, specs["bias"], "bias", places)
    options = {
        name: _place(getattr(given, name), specs[name], name, places) for name in _OPTIONS if name in specs
    }
    return replace(given, bias=bias, **options)


def _place(x: Any, spec: Any, name: str, places: Places) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    check_spec(f"specs: {name}", spec, x.dim(), mesh_of(places.key))
    return place_op(x, places.key, spec_text(spec))
