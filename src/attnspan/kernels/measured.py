"""What was measured on a kind of GPU: the time of each backend, and the fastest blocks of our own kernels.

A default is what was measured. Tables come with the package, in the folder ``tables``, by the name of a GPU;
those that `attnspan tune --device cuda` writes on a machine go first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .tuned import Key, cache_path, file_name, lookup_in, read

__all__ = ["CHOICE", "DECODING", "blocks", "forget", "kind_of", "order"]

#: The backend of entries that hold the nanoseconds of each backend, and the most queries of decoding.
CHOICE, DECODING = "choice", 16
_TABLES = Path(__file__).parent / "tables"
# torch.compile asks while it reads a call, and keeps the answers.


def kind_of(band: str, q_len: int, k_len: int) -> str:
    """The kind of a call: decoding, a band by its name, or "spans" for any other mask."""
    return "decode" if q_len <= DECODING and q_len < k_len else band or "spans"


def order(gpu: str, dtype: str, head_dim: int, kind: str) -> tuple[str, ...]:
    """Backends by their measured times, the fastest first; none where nothing was measured.

    Args:
        gpu: Name of the GPU, as `attnspan.torch` has it.
        dtype: Of q.
        head_dim: Elements of a key; what was measured for the next larger one counts.
        kind: See `kind_of`.
    """
    found = {}
    for key, times in _entries(gpu).items():
        if (key.backend, key.dtype, key.mask_kind) == (CHOICE, dtype, kind):
            found[key.head_dim] = times
    larger = [dim for dim in sorted(found) if dim >= head_dim]
    times = found[larger[0]] if larger else {}
    return tuple(sorted(times, key=lambda name: times[name]))


def blocks(gpu: str, kernel: str, dtype: str, head_dim: int) -> dict[str, int]:
    """The fastest block sizes of one of Triton's kernels; none where nothing was measured.

    Args:
        gpu, dtype: As for `order`.
        kernel: "forward", "queries" or "keys".
        head_dim: The larger head dim; what was measured for the next larger one counts.
    """
    found = {}
    for key, config in _entries(gpu).items():
        if (key.backend, key.direction, key.dtype) == ("triton", kernel, dtype):
            found[key.head_dim] = config
    larger = [dim for dim in sorted(found) if dim >= head_dim]
    return found[larger[0]] if larger else {}


def forget() -> None:
    """Read the tables again."""
    _entries.cache_clear()


order._dynamo_marked_constant = True  # type: ignore[attr-defined]
blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _entries(gpu: str) -> dict[Key, dict[str, int]]:
    found: dict[Key, dict[str, int]] = {}
    for path in (_TABLES / file_name(gpu), cache_path(gpu)):  # those of this machine replace others
        found |= lookup_in(read(path, gpu)) if path is not None else {}
    return found
