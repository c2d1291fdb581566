"""The compiled kernel in another process: for another machine, under an emulator, or built with sanitizers.

``ATTNSPAN_RUNNER`` is the command of tests/native/run_problem.cc, which says what is sent. `Runner` takes the
place of ``attnspan._core``, so that the tests of the kernel run as they are.
"""

import ctypes
import math
import struct
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

#: (address, dtype code, shape, strides in elements): what the compiled module takes beside tensors.
Array = tuple[int, int, tuple[int, ...], tuple[int, ...]]
Config = tuple[int, int, int]  # block_q, block_k, threads

CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3}
ITEM_SIZES = {0: 4, 1: 2, 2: 2, 3: 4}  # bytes by dtype code
OK, BAD_BOUNDS, BAD_CONFIG = range(3)
DIRECTIONS = ("forward", "backward")
HEADER = "<16qd"


class Runner:
    """Does what ``attnspan._core`` does, one process for each call."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.machine, self._active, *self._levels = self._run(["levels"], b"").decode().split()

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        bounds: Any,
        scale: float,
        num_threads: int,
        config: Config | None = None,
    ) -> None:
        q, k, v, out, lse, bounds = map(_described, (q, k, v, out, lse, bounds))
        header = _header(False, q, k, v, bounds, scale, num_threads, config)
        self._solve(header, [bounds, q, k, v, out, lse], [out, lse])

    def backward(
        self,
        dout: Any,
        dlse: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        bounds: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        scale: float,
        num_threads: int,
        config: Config | None = None,
    ) -> None:
        q, k, v, out, lse, bounds = map(_described, (q, k, v, out, lse, bounds))
        grads = [_described(x) for x in (dq, dk, dv)]
        header = _header(True, q, k, v, bounds, scale, num_threads, config)
        given = [bounds, q, k, v, out, lse, _described(dout), *grads]
        self._solve(header, [*given, None if dlse is None else _described(dlse)], grads)

    def isa_levels(self) -> list[str]:
        return self._levels

    def active_isa(self) -> str:
        return self._active

    def blocks(self, direction: str, dtype: str) -> tuple[int, int, int, int, bool]:
        arguments = ["blocks", str(DIRECTIONS.index(direction)), str(CODES[dtype])]
        q_step, q_most, k_step, k_most, square = map(int, self._run(arguments, b"").split())
        return q_step, q_most, k_step, k_most, bool(square)

    def threading(self) -> str:
        return "own threads"

    def _solve(self, header: bytes, given: list[Array | None], written: list[Array]) -> None:
        response = self._run([], b"".join([header, *(part for x in given for part in _parts(x))]))
        outcome, batch, head, row = struct.unpack_from("<4q", response)
        at = struct.calcsize("<4q")
        assert len(response) == at + sum(map(_bytes, written))
        for array in written:
            ctypes.memmove(array[0], response[at : at + _bytes(array)], _bytes(array))
            at += _bytes(array)
        if outcome == BAD_BOUNDS:
            k_len = struct.unpack_from(HEADER, header)[6]
            raise ValueError(
                f"mask bounds: expected spans within 0 <= lo <= hi <= k_len = {k_len}; "
                f"row {row} (batch {batch}, head {head}) breaks this"
            )
        if outcome == BAD_CONFIG:
            raise ValueError("config: expected blocks that the kernel has")
        assert outcome == OK

    def _run(self, arguments: list[str], request: bytes) -> bytes:
        done = subprocess.run([*self.command, *arguments], input=request, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"ATTNSPAN_RUNNER: expected {self.command} to end with 0, got {done.returncode}. "
                f"It said: {done.stderr.decode(errors='replace')}"
            )
        return done.stdout


def _described(x: Any) -> Array:
    if isinstance(x, tuple):
        return x
    return x.data_ptr(), CODES[str(x.dtype).removeprefix("torch.")], tuple(x.shape), x.stride()


def _header(
    backward: bool,
    q: Array,
    k: Array,
    v: Array,
    bounds: Array,
    scale: float,
    num_threads: int,
    config: Config | None,
) -> bytes:
    batch, q_heads, q_len, head_dim = q[2]
    kv_heads, k_len, v_dim = k[2][1], k[2][2], v[2][3]
    runs, batches, heads = bounds[2][3], bounds[2][0], bounds[2][1]
    sizes = (batch, q_heads, kv_heads, q_len, k_len, head_dim, v_dim, runs, batches, heads)
    return struct.pack(HEADER, backward, q[1], *sizes, num_threads, *(config or (0, 0, 0)), scale)


def _parts(array: Array | None) -> Iterator[bytes]:
    """An array's frame and the memory that its strides reach."""
    if array is None:
        yield struct.pack("<4q", -1, 0, 0, 0)
        return
    address, _, shape, strides = array
    yield struct.pack("<4q", _bytes(array), *(strides[:3] if len(shape) == 4 else (0, 0, 0)))
    yield ctypes.string_at(address, _bytes(array))


def _bytes(array: Array) -> int:
    _, code, shape, strides = array
    assert min(strides) >= 0
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return ITEM_SIZES[code] * (reach + 1) if math.prod(shape) else 0
