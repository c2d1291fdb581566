"""Equal copies in a dense mask, along the batch or the heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.torch.masks.forms import distance, present
from attnspan_lab.doctor.torch.recording.attention_call import Attention

__all__ = ["MaskCopies"]

_AXES = {0: "the batch", 1: "the heads"}
_INDEX = {(0,): "mask[:1]", (1,): "mask[:, :1]", (0, 1): "mask[:1, :1]"}


@dataclass
class MaskCopies:
    """Dims along which a mask stores equal copies in all calls of a line so far.

    Attributes:
        dims: These dims, or None before the first call.
        shape: Shape of the first mask.
        saved: Its bytes that are copies.
        error: The largest difference of results without the copies.
    """

    dims: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    saved: int = 0
    error: float = 0.0

    def add(self, call: Attention) -> None:
        """Look at one more call. A mask that is made from the batch may differ in another batch."""
        mask = call.given.get("attn_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 4 or call.mask_sources or mask.requires_grad:
            self.dims = ()
            return
        self.dims = tuple(i for i in (_AXES if self.dims is None else self.dims) if _is_copied(mask, i))
        if not self.dims:
            return
        small = mask
        for i in self.dims:
            small = small.narrow(i, 0, 1)
        if not self.shape:
            self.shape = tuple(mask.shape)
            self.saved = (mask.numel() - small.numel()) * mask.itemsize
        self.error = max(self.error, distance(present(call, attn_mask=small), present(call)))

    def texts(self) -> tuple[str, str, str]:
        """Write evidence, remedy and trial. All are empty without copies."""
        if not self.dims:
            return "", "", ""
        many = " and ".join(f"{self.shape[i]} equal copies along {_AXES[i]}" for i in self.dims)
        shape = tuple(1 if i in self.dims else n for i, n in enumerate(self.shape))
        index = _INDEX[self.dims]
        remedy = f"Pass one copy, shape {shape}: make the mask without repeat, or pass {index}"
        return f"{many}: {bytes_text(self.saved)}", remedy, f"{index}: results differ by {self.error:.1e}"


def _is_copied(mask: Tensor, dim: int) -> bool:
    first = mask.detach().narrow(dim, 0, 1)
    return mask.shape[dim] > 1 and mask.stride(dim) != 0 and bool((mask == first).all())
