"""Foreign kernels for the tests of `wrap`: a C library as its users bind it, and an eager function."""

import ctypes
import itertools
import os
import shlex
import subprocess
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan.torch import Wrapped, wrap

#: The schema of kernels whose Python signature does not tell it.
QKV = "Tensor q, Tensor k, Tensor v"
_numbers = itertools.count()

SOURCE = Path(__file__).parent / "foreign" / "attention.c"


def build(folder: Path) -> "Library":
    """Compile the library with the system's C compiler, which building attnspan takes anyway."""
    path = folder / "foreign.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, str(SOURCE), "-o", str(path), "-lm"], check=True)
    return Library(path)


def _address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


class Library:
    """The library's two functions, with the signature of flash-attn's."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.foreign_calls.restype = ctypes.c_int64

    @property
    def calls(self) -> int:
        """Forward calls so far."""
        return self._library.foreign_calls()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention of contiguous float32 (B, S, H, D); returns out and lse."""
        for x in (q, k, v):
            assert x.is_contiguous(), "the C library would read other memory"
            assert x.dtype == torch.float32
        out = torch.full_like(q, float("nan"))
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))
        failed = self._library.foreign_forward(
            *map(_address, (q, k, v, out, lse)), *self._sizes(q, k, softmax_scale), int(causal)
        )
        assert not failed
        return out, lse

    def out(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
    ) -> Tensor:
        """The output alone."""
        return self.forward(q, k, v, softmax_scale, causal)[0]

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        for x in (dout, dlse, q, k, v):
            assert x.is_contiguous(), "the C library would read other memory"
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        failed = self._library.foreign_backward(
            *map(_address, (dout, dlse, q, k, v, dq, dk, dv)), *self._sizes(q, k, softmax_scale), int(causal)
        )
        assert not failed
        return dq, dk, dv

    @staticmethod
    def _sizes(q: Tensor, k: Tensor, scale: float | None) -> tuple[object, ...]:
        sizes = (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3])
        return *map(ctypes.c_int64, sizes), ctypes.c_float(q.shape[3] ** -0.5 if scale is None else scale)


def fresh_name(base: str = "kernel") -> str:
    """A name that no operator of this process has."""
    return f"{base}_{next(_numbers)}"


def inputs(q_len: int = 6, k_len: int = 6, batch: int = 2, grad: bool = False) -> list[Tensor]:
    """q, k, v of shape (batch, length, 3, 8)."""
    return [torch.randn(batch, n, 3, 8, requires_grad=grad) for n in (q_len, k_len, k_len)]


def wrap_foreign(foreign: Library, base: str = "foreign", **options: object) -> Wrapped:
    """The C library's attention with its backward, as its user would wrap it."""
    given = {"outputs": ("out", "lse"), "backward": foreign.backward, "layout": "bshd", **options}
    return wrap(foreign.forward, name=fresh_name(base), strides="contiguous", **given)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None) -> Tensor:
    """A user's own function, in (B, H, S, D)."""
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
