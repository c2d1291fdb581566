"""The compiled CPU kernel: float32, bfloat16 and float16, forward and backward, any mask.

It reads torch tensors and NumPy arrays, and writes results into arrays of the caller.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from attnspan.call import Problem, dropout
from attnspan.call.options import Options
from attnspan.errors import expect

#: Largest head dim of the compiled kernel.
MAX_HEAD_DIM = 576

# In the core's order. 0 leaves the choice to the kernel.
_CONFIG_FIELDS = ("block_q", "block_k", "threads")
_DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int64": 4, "float64": 5}

# The compiled module, for front ends whose arrays it reads without help. None if it is missing.
try:
    core, _core_error = cast(Any, import_module("attnspan._core")), ""
except ImportError as error:  # not built: other backends still work, and `supports` gives the reason
    core, _core_error = None, str(error)


def supports(problem: Problem) -> str | None:
    """Return None, or why the compiled kernel cannot run the problem."""
    if problem.device != "cpu":
        return f"it runs on CPU arrays, not on {problem.device}"
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim > MAX_HEAD_DIM or problem.v_dim > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if problem.head_dim == 0 or problem.v_dim == 0:
        return "it takes head dims from 1 on, not 0"
    if core is None:
        return f"the compiled module attnspan._core is missing: {_core_error} (build it with `pip install .`)"
    return None


def forward(
    q: Any,
    k: Any,
    v: Any,
    bounds: Any,
    out: Any,
    lse: Any,
    *,
    scale: float,
    num_threads: int,
    config: Mapping[str, int] | None = None,
    options: Options | None = None,
    table: Any = None,
) -> None:
    """Compute attention and write ``out`` and ``lse``.

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), float32, bfloat16 or float16. All
            arrays may have any strides whose last one is 1.
        bounds: (B|1, Hq|1, Sq, R, 2), int32.
        out: (B, Hq, Sq, Dv), written, in the dtype of q or in float32.
        lse: (B, Hq, Sq), contiguous, written, float32 or float64: the natural log-sum-exp, or -inf for a
            query without keys.
        scale: Factor of the scores.
        num_threads: Threads to use, at least 1.
        config: One of `configs`. None leaves the choice to the kernel.
        options: Softcap, bias, sinks, dropout and positions.
        table: int32 (B, columns), the pages of each batch element. Keys and values are then pools, (pages,
            Hkv, page_len, D) and (pages, Hkv, page_len, Dv). Sk is columns * page_len, and key j of batch
            element b is number j % page_len of page table[b, j // page_len]. A query that sees a key on a
            page outside the pool has NaN.

    Raises:
        ValueError: If bounds, configuration or options are illegal, or if arrays do not fit each other.

    Example:
        >>> import numpy as np
        >>> x, lse = np.ones((1, 1, 2, 8), "float32"), np.empty((1, 1, 2), "float32")
        >>> bounds, out = np.array([[0, 1], [0, 2]], "int32").reshape(1, 1, 2, 1, 2), np.empty_like(x)
        >>> forward(x, x, x, bounds, out, lse, scale=1.0, num_threads=1)
        >>> out[0, 0, :, 0].tolist()
        [1.0, 1.0]
    """
    if out.shape[0] * out.shape[1] * out.shape[2] == 0:
        return
    bounds = _packed(bounds)  # the name keeps a copy alive while the kernel reads it
    arrays = [_array(x) for x in (q, k, v, out, lse, bounds)]
    table = None if table is None else _packed(table)
    pages = () if table is None else (_array(table),)
    _compiled().forward(*arrays, scale, num_threads, _config(config), arguments(options), *pages)


def backward(
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
    *,
    scale: float,
    num_threads: int,
    config: Mapping[str, int] | None = None,
    options: Options | None = None,
    dbias: Any = None,
    dsinks: Any = None,
    part: bool = False,
) -> None:
    """Write the gradients of `forward` into ``dq``, ``dk`` and ``dv``.

    Args:
        dout: Gradient of ``out``, (B, Hq, Sq, Dv), with a unit last stride.
        dlse: Gradient of ``lse``, (B, Hq, Sq), float32, or None.
        q, k, v, bounds, scale, config, options: As in `forward`.
        out: As `forward` wrote it.
        lse: As `forward` wrote it. Weights are recomputed from it, so float32 has an error of |lse| * 2^-24.
            Pass float64 if scores or biases are large.
        dq, dk, dv: The shapes of q, k and v, written, all in the dtype of q or all in float32.
        num_threads: Threads to use. The same number gives the same bits.
        dbias: The shape of the bias, written, float32 and contiguous, or None.
        dsinks: (Hq,), written, float32, or None.
        part: Whether ``out`` and ``lse`` belong to a softmax over more keys than these.

    Raises:
        ValueError: If bounds or configuration are illegal, or if arrays do not fit each other.

    Example:
        >>> import numpy as np
        >>> x, lse = np.ones((1, 1, 1, 4), "float32"), np.zeros((1, 1, 1), "float32")
        >>> bounds, dq, dk, dv = np.array([[[[[0, 1]]]]], "int32"), *np.empty((3, 1, 1, 1, 4), "float32")
        >>> forward(x, x, x, bounds, dq, lse, scale=1.0, num_threads=1)
        >>> backward(x, None, x, x, x, dq.copy(), lse, bounds, dq, dk, dv, scale=1.0, num_threads=1)
        >>> dv[0, 0, 0].round(6).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if out.shape[0] * out.shape[1] == 0:
        for x in (dbias, dsinks):
            if x is not None:
                x[:] = 0
        return
    bounds, dlse = _packed(bounds), None if dlse is None else _packed(dlse)
    arrays = [_array(x) for x in (dout, dlse, q, k, v, out, lse, bounds, dq, dk, dv)]
    rest = scale, num_threads, _config(config), arguments(options), _array(dbias), _array(dsinks), part
    _compiled().backward(*arrays, *rest)


def move_rows(target: Any, to: Any, source: Any, at: Any, *, num_threads: int, add: bool = False) -> None:
    """Copy rows by index, or add them, for exchanges between ranks.

    Row i of an array is row i % length of plane i // length. Each row of the target may occur once.

    Args:
        target: (planes, length, inner, heads, width), float32, bfloat16 or float16, written.
        to, at: Row numbers in the target and in the source, int32 (n,), contiguous. None means all, in order.
        source: An array of the same kind, with other planes and length.
        num_threads: Threads to use.
        add: Add to the target, which is then float32.

    Raises:
        ValueError: If shapes, dtypes or row numbers do not fit each other. Nothing is then written.

    Example:
        >>> import numpy as np
        >>> x, y = np.arange(3, dtype="float32").reshape(1, 3, 1, 1, 1), np.zeros((1, 2, 1, 1, 1), "float32")
        >>> move_rows(y, None, x, np.array([2, 0], "int32"), num_threads=1)
        >>> y.ravel().tolist()
        [2.0, 0.0]
    """
    _compiled().move_rows(*(_array(x) for x in (target, to, source, at)), add, num_threads)


def configs(problem: Problem, direction: str) -> list[dict[str, int]]:
    """List configurations that are worth trying for a problem, with the kernel's own choice first.

    Args:
        problem: The problem to compute.
        direction: "forward" or "backward".

    Returns:
        Values of ``block_q`` and ``block_k`` (queries and keys of a block) and ``threads`` (the most to
        use). 0 leaves the choice to the kernel.

    Example:
        >>> configs(Problem(1, 1, 1, 4096, 4096, 64, 64, 1, "float32", "cpu"), "forward")[0]
        {'block_q': 0, 'block_k': 0, 'threads': 0}
    """
    q_step, q_max, k_step, k_max, square = _compiled().blocks(direction, problem.dtype)
    keys = _sizes(k_step, k_max, problem.k_len)
    rows = _sizes(q_step, q_max, problem.q_len)
    pairs = [(k, k) for k in keys] if square else [(q, k) for q in rows for k in keys]
    blocks = [{"block_q": q, "block_k": k, "threads": 0} for q, k in [(0, 0), *pairs]]
    return [*blocks, {"block_q": 0, "block_k": 0, "threads": 1}]


def _sizes(step: int, largest: int, length: int) -> list[int]:
    """Multiples of a step with growing distances, up to the first one that is at least the length."""
    sizes: list[int] = []
    size = step
    while size <= largest and (not sizes or sizes[-1] < length):
        sizes.append(size)
        size += step * max(1, size // (4 * step))
    return sizes


def counters() -> dict[str, dict[str, float]]:
    """Totals over all calls of this process so far, for "forward" and "backward".

    - ``calls``: number of calls
    - ``seconds``: time inside the kernel
    - ``flops``: operations over visible pairs, 2 * pairs * (D + Dv) forward and 2.5 times as many backward
    - ``threads``: sum of the threads that each call might use, which is one for a very short call
    """
    return dict(_compiled().counters())


def peak_kinds() -> list[str]:
    """Return the kinds of multiply-add of the instruction-set level in use, for `peak`."""
    return list(_compiled().peak_kinds())


def peak(kind: str, *, num_threads: int, seconds: float) -> float:
    """Measure the best rate of multiply-adds on registers, in FLOP/s over all threads.

    Args:
        kind: One of `peak_kinds`.
        num_threads: Threads to use.
        seconds: Time to measure.

    Example:
        >>> peak(peak_kinds()[0], num_threads=1, seconds=0.01) > 0
        True
    """
    return float(_compiled().peak(kind, num_threads, seconds))


def read_bandwidth(size: int, *, num_threads: int, seconds: float) -> float:
    """Measure how fast memory is read, in bytes/s over all threads.

    Args:
        size: Bytes to read, each once, at least 4096 for each thread. Choose more than the caches hold.
        num_threads: Threads to use.
        seconds: Time to measure.
    """
    return float(_compiled().read_bandwidth(size, num_threads, seconds))


def isa() -> str:
    """Return the instruction-set level in use: the machine's best, or the level in ``ATTNSPAN_ISA``.

    Raises:
        ValueError: If the build or the machine lacks that level.

    Example:
        >>> isa() in isa_levels()
        True
    """
    return str(_compiled().active_isa())


def isa_levels() -> list[str]:
    """Return the instruction-set levels of this build that this machine can run, lowest first."""
    return list(_compiled().isa_levels())


def threading() -> str:
    """Return the threads that run the loops: "OpenMP of the process" (torch's), or "own threads" (forks)."""
    return str(_compiled().threading())


def use_large_pages(x: Any) -> None:
    """Ask the system for pages of 2 MiB for a new tensor, before the first write to it.

    Reading keys and values then needs far fewer page-table walks. It works only on Linux, and the system may
    refuse. In that case, or without the compiled module, the tensor stays as it is.
    """
    if core is not None:
        core.use_large_pages(x.data_ptr(), x.numel() * x.element_size())


def _compiled() -> Any:
    if core is None:
        raise ImportError(
            f"attnspan._core: expected the compiled module, got {_core_error}. Build it: pip install ."
        )
    return core


def _packed(x: Any) -> Any:
    """The array itself if it is contiguous, else a contiguous copy."""
    if hasattr(x, "data_ptr"):
        return x.contiguous()
    return x if x.flags.c_contiguous else x.copy()


def _config(config: Mapping[str, int] | None) -> tuple[int, ...] | None:
    if config is None:
        return None
    unknown, known = sorted(set(config) - set(_CONFIG_FIELDS)), ", ".join(_CONFIG_FIELDS)
    remedy = "Pass one of kernels.cpu.configs(...)"
    expect(not unknown, "config", f"the keys {known}", f"{', '.join(unknown)} as well", remedy)
    return tuple(config.get(name, 0) for name in _CONFIG_FIELDS)


def arguments(options: Options | None) -> tuple[Any, ...] | None:
    """Convert the options for the compiled module."""
    if options is None:
        return None
    softcap, bias, kind, sinks, p, *rest = options
    dropped = dropout.threshold(p) if p else 0
    return softcap, _array(bias), kind, _array(sinks), dropped, *[_array(x) for x in rest]


def _array(x: Any) -> Any:
    """The array itself if the compiled module can read it, else (address, dtype, shape, strides)."""
    if x is None or hasattr(type(x), "__dlpack_c_exchange_api__"):
        return x
    if hasattr(x, "data_ptr"):
        return x.data_ptr(), _DTYPE_CODES.get(str(x.dtype)[6:], -1), tuple(x.shape), x.stride()
    strides = tuple(s // x.itemsize for s in x.strides)
    return x.ctypes.data, _DTYPE_CODES.get(x.dtype.name, -1), x.shape, strides
