"""Torch's checks of a call: autocast, DTensors, cached masks."""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import arrays_for, is_array, own
from attnspan.base.recorded import is_jit_traced
from attnspan.call import Front, lower_mask
from attnspan.call.options import Given
from attnspan.errors import DeviceError, DtypeError
from attnspan.kernels import vendor
from attnspan.kernels._autocast import AUTOCAST_DEVICES, autocast_dtype
from attnspan.masks import Mask, Prepared
from attnspan.masks.bands import Band
from attnspan.masks.bounds import Spans

from . import _options
from ._lowered import lowered
from ._split_masks import lower_parts
from ._watched import constant_when_traced, is_transformed
from .dtensor import Places, places_of

#: The module of DTensors. Its import is slow, and no tensor is a DTensor before it.
_DTENSORS = "torch.distributed.tensor"


class TorchFront(Front):
    """Checks for plain tensors and DTensors.

    Attributes:
        mesh: The mesh of a plan, whose axes may shard the sequence of DTensors, or None.
        places: Placement of q, k and v on their mesh. None for plain tensors.
        return_lse: Whether the call returns lse.
        widens: Whether head dims may be 0.
    """

    expected, convert = "a torch.Tensor", "Convert it with torch.as_tensor"
    convert_foreign = "Convert it with torch.from_dlpack, or call the attention of its framework"
    an_array, noun = "a tensor", "tensor"
    seed = "an integer tensor"
    new_seed = "Pass another one for each layer and step, such as torch.randint(2**62, ())"
    mesh: Any = None
    places: Places | None = None

    return_lse = widens = False

    def __init__(self, return_lse: Any = False, widens: bool = False) -> None:
        self.return_lse, self.widens = bool(return_lse), widens

    def takes(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def check_taken(self, name: str, x: Any, expected: str) -> None:
        if type(x) is not Tensor:
            super().check_taken(name, x, expected)
        if x.is_nested:
            remedy = (
                "Call scaled_dot_product_attention, which accepts jagged (B, H, j, D). Or pass x.values() of"
            )
            remedy += ' a jagged (B, j, H, D) in layout="thd" with documents(x.offsets())'
            raise DtypeError(name, expected=expected, got="a nested tensor", remedy=remedy)
        if x.layout is not torch.strided:
            remedy = "Call .to_dense()"
            raise DtypeError(name, expected="a dense tensor", got=f"one of {x.layout}", remedy=remedy)

    def pad_last(self, x: Any) -> Any:
        return torch.nn.functional.pad(x, (0, 1))

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask
        if _DTENSORS in sys.modules:
            self.split(q, k, v, given, layout)
        q, k, v = autocast(*(self.widened(q, k, v) if self.widens else (q, k, v)))
        return (q, k, v) if layout == "bhsd" else (to_bhsd(q, layout), to_bhsd(k, layout), to_bhsd(v, layout))

    def split(self, q: Any, k: Any, v: Any, given: Given, layout: str) -> Places | None:
        """Placement of DTensors on their mesh, including the options. None for plain tensors."""
        self.places = places_of(q, k, v, layout, given, self.mesh)
        return self.places

    def check_place(self, name: str, x: Any, q: Any) -> None:
        # Lowering moves NumPy arrays, for example buckets.
        if isinstance(x, Tensor) and x.device != q.device:
            wanted, remedy = f"device {q.device} (as q)", "Move it to one device"
            raise DeviceError(name, expected=wanted, got=str(x.device), remedy=remedy)

    def check_given(self, given: Given, q: Any, k: Any) -> None:
        """Raise for indices of another framework or device. Otherwise the error would name the mask."""
        del k
        for name, x in (("q_index", given.q_index), ("k_index", given.k_index)):
            if is_array(x) and not isinstance(x, (Tensor, np.ndarray)):
                raise _foreign(name, x)
            self.check_place(name, x, q)

    def lower_seed(self, seed: Any, batch: Any, heads: Any) -> Any:
        _options.check_seed(seed, batch, heads)
        seed = seed.to(torch.int64)
        # Compiled code saves the seed, and cannot check whether it is an inference tensor. A copy is not, and
        # the backward pass does not recompute a copy of this kind.
        return seed[None].cumsum(0)[0] if torch.compiler.is_compiling() else seed

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared, Given]:
        found = None
        if _DTENSORS in sys.modules:
            found = lower_parts(mask, self.places, q, k.shape[2], given.q_index, given.k_index)
        if found is None and _may_remember(given, q):
            found = lowered(mask, q, k)
        if found is None and isinstance(mask, (Prepared, Spans)):
            found = mask if isinstance(mask, Prepared) else Prepared(mask, bare=True)
        return lower_mask(mask, q, k, given, like=q) if found is None else found, given

    def bounds(self, placed: Prepared, mask: Any, q: Any) -> tuple[Any, Any]:
        bounds: Any = placed.lowered.bounds
        if isinstance(bounds, np.ndarray):
            bounds = torch.as_tensor(own(bounds), device=q.device)
        if not isinstance(bounds, Tensor):
            raise _foreign("mask", bounds)
        if not isinstance(mask, (Prepared, Spans)):
            # A recorded program may receive other lengths than its masks were lowered for.
            recorded = torch.full((), placed.lowered.k_len, dtype=torch.int64) if is_jit_traced() else None
            return bounds, recorded
        spans = mask if isinstance(mask, Spans) else mask.lowered
        k_len = spans._k_len
        # To a compiler the number would be a constant, and on a GPU reading it synchronizes.
        if not torch.compiler.is_compiling() and (
            "k_len" in vars(spans) or not isinstance(k_len, Tensor) or k_len.is_cpu
        ):
            return bounds, None
        return bounds, k_len if isinstance(k_len, Tensor) else torch.as_tensor(k_len, device=q.device)

    def band(
        self, mask: Any, given: Given, q: Any, k: Any, scale: Any
    ) -> tuple[Band | None, tuple[Any, ...]]:
        if q.device.type != vendor.DEVICE:
            return None, ()
        found = mask.band() if isinstance(mask, Mask) else None
        if found is not None and found.cu_q is not None:
            found = _one_row(found, q, k)
        wants_dlse = self.return_lse and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        extras = {
            "DTensors": self.places is not None,
            "indices": not (given.q_index is None is given.k_index),
            "gradient of lse": wants_dlse,
            # Kernels may expect the largest score at the largest product.
            "scale of 0 or below": scale is not None and scale <= 0,
        }
        names = tuple([name for name, holds in extras.items() if holds])
        return found, ("" if found is None else found.name, names, capability_of(q.device))


def _one_row(band: Band, q: Any, k: Any) -> Band | None:
    """A band of documents with their offsets as two arrays of one axis, or None if no kernel supports it."""
    cu_k = band.cu_q if band.cu_k is None else band.cu_k
    if band.cu_k is None and q.shape[2] != k.shape[2]:
        return None
    # A document may have more queries than keys. FlashAttention treats a window beyond all keys as no mask.
    if band.cu_k is not None and band.right not in (None, 0):
        return None
    shapes = {len(x.shape) for x in (band.cu_q, cu_k)}
    return band._replace(cu_k=cu_k) if shapes == {1} else None


@constant_when_traced
def capability_of(device: torch.device) -> int | None:
    """Compute capability of a CUDA device, such as 90, or None if there is no such device."""
    if device not in _capabilities:
        _capabilities[device] = None
        if device.type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            _capabilities[device] = 10 * major + minor
    return _capabilities[device]


_capabilities: dict[torch.device, int | None] = {}


def _foreign(name: str, x: Any) -> DtypeError:
    got, remedy = f"one of {arrays_for([x]).name}", TorchFront.convert_foreign
    return DtypeError(name, expected="an array of torch or NumPy", got=got, remedy=remedy)


#: Front for options of plain tensors, which do not depend on the call.
PLAIN = TorchFront()


def _may_remember(given: Given, q: Any) -> bool:
    """Whether the spans of a mask may be cached: the call has no indices and no transform is active."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in (Tensor, torch.nn.Parameter)
        and given.q_index is None is given.k_index
        and not is_transformed()
        and not is_captured(q)
    )


def is_captured(q: Tensor) -> bool:
    """Whether a CUDA graph is recording. A replay writes its tensors later, in the graph's memory."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in autocast's dtype, as torch's own attention casts them, except float64."""
    device = tensors[0].device.type
    if device in AUTOCAST_DEVICES and not torch.is_autocast_enabled(device):
        return tensors
    dtype = autocast_dtype(device)
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def to_bhsd(x: Tensor, layout: str) -> Tensor:
    """A view in (B, H, S, D) order."""
    if layout == "bhsd":
        return x
    return x.transpose(1, 2) if layout == "bshd" else x.transpose(0, 1).unsqueeze(0)


def from_bhsd(out: Tensor, lse: Tensor, layout: str, return_lse: bool) -> Any:
    """The output as a view in the layout, with lse as (B, H, S), or (H, T) in "thd", if ``return_lse``."""
    if layout != "bhsd":
        out = out.transpose(1, 2) if layout == "bshd" else out[0].transpose(0, 1)
    return (out, lse[0] if layout == "thd" else lse) if return_lse else out
