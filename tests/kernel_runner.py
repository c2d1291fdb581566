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

CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int64": 4}
ITEM_SIZES = {0: 4, 1: 2, 2: 2, 3: 4, 4: 8}  # bytes by dtype code
OK, BAD_BOUNDS, BAD_CONFIG = range(3)
DIRECTIONS = ("forward", "backward")
HEADER = "<16qd"
OPTIONS = "<10qd"
NO_OPTIONS = (0.0, None, 0, None, 0, None, None, None)  # as kernels/cpu.py gives them


class Runner:
    """Does what ``attnspan._core`` does, one process for each call."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.machine, self._active, *self._levels = self._run(["levels"], b"").decode().split()

    def forward(self, q, k, v, out, lse, bounds, scale, num_threads, config=None, options=None, table=None):
        assert table is None, "the program takes no pages"
        arrays = [_described(x) for x in (bounds, q, k, v, out, lse)]
        self._solve(False, arrays, [], scale, num_threads, config, options, [None, None])

    def backward(
        self,
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        bounds,
        dq,
        dk,
        dv,
        scale,
        num_threads,
        config=None,
        options=None,
        dbias=None,
        dsinks=None,
        part=False,
    ):
        assert not part, "the program takes no parts of a softmax"
        arrays = [_described(x) for x in (bounds, q, k, v, out, lse)]
        more = [_described(x) for x in (dout, dq, dk, dv, dlse)]
        self._solve(True, arrays, more, scale, num_threads, config, options, [dbias, dsinks])

    def isa_levels(self) -> list[str]:
        return self._levels

    def active_isa(self) -> str:
        return self._active

    def blocks(self, direction: str, dtype: str) -> tuple[int, int, int, int, bool]:
        arguments = ["blocks", str(DIRECTIONS.index(direction)), str(CODES[dtype])]
        q_step, q_most, k_step, k_most, square = map(int, self._run(arguments, b"").split())
        return q_step, q_most, k_step, k_most, bool(square)

    def register_torch_operators(self) -> bool:
        return False  # torch's operators call this class from Python

    def threading(self) -> str:
        return "own threads"

    def _solve(self, backward, arrays, more, scale, num_threads, config, options, gradients):
        options = options or NO_OPTIONS
        _, bias, _, sinks, _, seed, q_index, k_index = options
        extra = [_described(x) for x in (bias, sinks, seed, q_index, k_index, *gradients)]
        header, given = _header(backward, *arrays[:4], scale, num_threads, config), [*arrays, *more, *extra]
        written = [*more[1:4], *filter(None, extra[5:])] if backward else arrays[4:]
        request = [header, _options(options, extra), *(part for x in given for part in _parts(x))]
        response = self._run([], b"".join(request))
        outcome, batch, head, row = struct.unpack_from("<4q", response)
        at = struct.calcsize("<4q")
        assert len(response) == at + sum(map(_bytes, written))
        for array in written:
            ctypes.memmove(array[0], response[at : at + _bytes(array)], _bytes(array))
            at += _bytes(array)
        if outcome == BAD_BOUNDS:
            raise ValueError(
                f"mask bounds: expected spans within 0 <= lo <= hi <= k_len = {arrays[2][2][2]}; "
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


def _described(x: Any) -> Any:
    if x is None or isinstance(x, tuple):
        return x
    return x.data_ptr(), CODES[str(x.dtype).removeprefix("torch.")], tuple(x.shape), x.stride()


def _options(options: tuple[Any, ...], arrays: list[Array | None]) -> bytes:
    softcap, _, kind, _, threshold, *_ = options
    bias, _, seed, q_index, k_index, *_ = arrays
    extents = (0, 0, 0, 0) if bias is None else (*bias[2], 1, 1)[:4] if len(bias[2]) < 4 else bias[2]
    rows = [0 if x is None else x[2][0] for x in (q_index, k_index)]
    per_head = seed is not None and len(seed[2]) == 2
    code = 0 if bias is None else bias[1]
    return struct.pack(OPTIONS, kind, code, *extents, threshold, per_head, *rows, softcap)


def _header(backward, bounds, q, k, v, scale, num_threads, config):
    batch, q_heads, q_len, head_dim = q[2]
    batches, heads, _, runs, _ = bounds[2]
    sizes = (batch, q_heads, k[2][1], q_len, k[2][2], head_dim, v[2][3], runs, batches, heads)
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
    assert min(strides, default=0) >= 0
    reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return ITEM_SIZES[code] * (reach + 1) if math.prod(shape) else 0
