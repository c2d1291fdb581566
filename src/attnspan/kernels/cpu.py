"""The compiled CPU kernel: float32, bfloat16 and float16, forward and backward, any mask.

Takes torch tensors and NumPy arrays alike; knows neither framework beyond their attributes. Results are
written into arrays that the caller made.
"""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import _dropout as dropout
from ..call import Problem
from ..options import Options
from . import tuned

__all__ = [
    "MAX_HEAD_DIM",
    "backward",
    "compiled",
    "configs",
    "counters",
    "forward",
    "isa",
    "isa_levels",
    "move_rows",
    "peak",
    "peak_kinds",
    "read_bandwidth",
    "supports",
    "threading",
]

MAX_HEAD_DIM = 256

_DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int64": 4, "float64": 5}

_core: ModuleType | None
_core_error = ""
try:
    _core = import_module("attnspan._core")
except (
    ImportError
) as error:  # A machine without a compiler: the other backends still work, and `supports` says why.
    _core, _core_error = None, str(error)
else:
    tuned.load(_core)


def supports(problem: Problem) -> str | None:
    """Return None, or why the compiled kernel cannot run the problem.

    Example:
        >>> supports(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float32", "cuda"))
        'it runs on CPU arrays, not on cuda'
    """
    if problem.device != "cpu":
        return f"it runs on CPU arrays, not on {problem.device}"
    if problem.dtype not in ("float32", "bfloat16", "float16"):
        return f"it takes float32, bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim > MAX_HEAD_DIM or problem.v_dim > MAX_HEAD_DIM:
        return f"it takes head dims up to {MAX_HEAD_DIM}, not {problem.head_dim} and {problem.v_dim}"
    if problem.head_dim == 0 or problem.v_dim == 0:
        return "it takes head dims from 1 on, not 0"
    if _core is None:
        return f"the compiled module attnspan._core is missing ({_core_error}); build it with `pip install .`"
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
) -> None:
    """Attend, writing ``out`` and ``lse``.

    Args:
        q: Shape (B, Hq, Sq, D), float32, bfloat16 or float16; any strides with a unit last one, as all.
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32.
        out: Shape (B, Hq, Sq, Dv), written: in the dtype of q, or in float32.
        lse: Shape (B, Hq, Sq), contiguous, written: natural logarithm, -inf for a row without keys. float32,
            or float64 for a softmax that is merged from several calls.
        scale: Factor of the scores.
        num_threads: Threads to use, at least 1.
        config: One of `configs`; None takes the tuned one, or else the kernel's own choice.
        options: Softcap, bias, sinks, dropout and positions; None for a plain call.

    Raises:
        ValueError: Illegal bounds, configuration or options, or arrays that do not fit each other.

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
    bounds = _packed(bounds)  # A name keeps a copy alive while the kernel reads it.
    _compiled().forward(
        _array(q),
        _array(k),
        _array(v),
        _array(out),
        _array(lse),
        _array(bounds),
        scale,
        num_threads,
        None if config is None else _config(config),
        None if options is None else _options(options),
    )


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
) -> None:
    """Write the gradients of `forward` into ``dq``, ``dk`` and ``dv``.

    Args:
        dout: Gradient of ``out``, shape (B, Hq, Sq, Dv), unit last stride.
        dlse: Gradient of ``lse``, shape (B, Hq, Sq), float32, or None.
        q: As in `forward`.
        k: As in `forward`.
        v: As in `forward`.
        out: As `forward` wrote it.
        lse: As `forward` wrote it, float32: a large one is computed anew from the keys of this call. In
            float64 it is taken as it is, and may be of a softmax of which these keys are a part, as ``out``.
        bounds: As in `forward`.
        dq: Shape of q, written: in the dtype of q, or in float32, as all three.
        dk: Shape of k, written.
        dv: Shape of v, written.
        scale: As in `forward`.
        num_threads: Threads to use. The same number gives the same bits.
        config: As in `forward`.
        options: As in `forward`.
        dbias: Written, float32, contiguous, in the shape of the bias. None where it is not wanted.
        dsinks: Written, float32 (Hq,), or None.

    Raises:
        ValueError: Illegal bounds or configuration, or arrays that do not fit each other.

    Example:
        >>> import numpy as np
        >>> x, lse = np.ones((1, 1, 1, 4), "float32"), np.zeros((1, 1, 1), "float32")
        >>> bounds, dq, dk, dv = np.array([[[[[0, 1]]]]], "int32"), *np.empty((3, 1, 1, 1, 4), "float32")
        >>> forward(x, x, x, bounds, dq, lse, scale=1.0, num_threads=1)
        >>> backward(x, None, x, x, x, dq.copy(), lse, bounds, dq, dk, dv, scale=1.0, num_threads=1)
        >>> dv[0, 0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if out.shape[0] * out.shape[1] == 0:
        for x in (dbias, dsinks):
            if x is not None:
                x[:] = 0
        return
    bounds, dlse = _packed(bounds), None if dlse is None else _packed(dlse)
    _compiled().backward(
        _array(dout),
        None if dlse is None else _array(dlse),
        *(_array(x) for x in (q, k, v, out, lse, bounds, dq, dk, dv)),
        scale,
        num_threads,
        None if config is None else _config(config),
        None if options is None else _options(options),
        None if dbias is None else _array(dbias),
        None if dsinks is None else _array(dsinks),
    )


def move_rows(target: Any, to: Any, source: Any, at: Any, *, num_threads: int, add: bool = False) -> None:
    """Copy rows by index, or add them: what an exchange between ranks sends and receives.

    Row i of an array is row i % length of plane i // length. Each row of the target may be named once.

    Args:
        target: Shape (planes, length, inner, heads, width), float32, bfloat16 or float16, written; any
            strides with a unit last one.
        to: Rows of the target, int32 (n,), contiguous; None for all in order.
        source: Shape (planes, length, inner, heads, width), with planes and length of its own.
        at: Rows of the source, int32 (n,), contiguous; None for all in order.
        num_threads: Threads to use.
        add: Add to the target, which is float32 then.

    Raises:
        ValueError: Shapes, dtypes or numbers of rows do not fit each other; nothing is written.

    Example:
        >>> import numpy as np
        >>> x, y = np.arange(3, dtype="float32").reshape(1, 3, 1, 1, 1), np.zeros((1, 2, 1, 1, 1), "float32")
        >>> move_rows(y, None, x, np.array([2, 0], "int32"), num_threads=1)
        >>> y.ravel().tolist()
        [2.0, 0.0]
    """
    arrays = _array(target), _array(source)
    index = tuple(None if x is None else _array(x) for x in (to, at))
    _compiled().move_rows(arrays[0], index[0], arrays[1], index[1], add, num_threads)


def configs(problem: Problem, direction: str) -> list[dict[str, int]]:
    """The configurations that are worth trying for a problem, the kernel's own choice first.

    Args:
        problem: What is to be computed.
        direction: "forward" or "backward".

    Returns:
        Values of ``block_q`` and ``block_k`` (rows and keys of a block) and ``threads`` (at most so many); 0
        is the kernel's own choice.

    Raises:
        ValueError: Another direction.

    Example:
        >>> configs(Problem(1, 1, 1, 4096, 4096, 64, 64, 1, "float32", "cpu"), "forward")[0]
        {'block_q': 0, 'block_k': 0, 'threads': 0}
    """
    q_step, q_most, k_step, k_most, square = _compiled().blocks(direction, problem.dtype)
    keys = _sizes(k_step, k_most, problem.k_len)
    pairs = (
        [(k, k) for k in keys]
        if square
        else [(q, k) for q in _sizes(q_step, q_most, problem.q_len) for k in keys]
    )
    blocks = [{"block_q": q, "block_k": k, "threads": 0} for q, k in [(0, 0), *pairs]]
    return [*blocks, {"block_q": 0, "block_k": 0, "threads": 1}]


def _sizes(step: int, most: int, length: int) -> list[int]:
    """Multiples of a step: each one at first, then ever more coarsely, as far as the length makes sense."""
    sizes: list[int] = []
    size = step
    while size <= most and (not sizes or sizes[-1] < length):
        sizes.append(size)
        size += step * max(1, size // (4 * step))
    return sizes


def counters() -> dict[str, dict[str, float]]:
    """Totals over all calls of this process so far, by direction.

    Returns:
        For "forward" and "backward": ``calls``, ``seconds`` inside the kernel, and ``flops`` over visible
        pairs, 2 * pairs * (D + Dv) forward and 2.5 times as many backward.

    Example:
        >>> sorted(counters()["forward"])
        ['calls', 'flops', 'seconds']
    """
    return dict(_compiled().counters())


def peak_kinds() -> list[str]:
    """Return the kinds of multiply-add that the level in use has, for `peak`.

    Example:
        >>> peak_kinds()[0]
        'fma_f32'
    """
    return list(_compiled().peak_kinds())


def peak(kind: str, *, num_threads: int, seconds: float) -> float:
    """Measure the machine's best rate of multiply-adds, on registers alone.

    Args:
        kind: One of `peak_kinds`.
        num_threads: Threads to use.
        seconds: About how long to measure.

    Returns:
        FLOP/s over all threads.

    Raises:
        ValueError: No such kind.

    Example:
        >>> peak("fma_f32", num_threads=1, seconds=0.01) > 0
        True
    """
    return float(_compiled().peak(kind, num_threads, seconds))


def read_bandwidth(size: int, *, num_threads: int, seconds: float) -> float:
    """Measure how fast memory is read, each byte once.

    Args:
        size: Bytes of the array that is read; beyond the caches it is the memory's speed.
        num_threads: Threads to use.
        seconds: About how long to measure.

    Returns:
        Bytes/s over all threads.

    Raises:
        ValueError: Less than 4096 bytes for each thread.

    Example:
        >>> read_bandwidth(1 << 20, num_threads=1, seconds=0.01) > 0
        True
    """
    return float(_compiled().read_bandwidth(size, num_threads, seconds))


def isa() -> str:
    """Return the instruction-set level in use: the machine's best, or the one that ``ATTNSPAN_ISA`` names.

    Raises:
        ValueError: ``ATTNSPAN_ISA`` names a level that the build or the machine lacks.

    Example:
        >>> isa() in isa_levels()
        True
    """
    return str(_compiled().active_isa())


def isa_levels() -> list[str]:
    """Return the levels that this build has and this machine can run, lowest first.

    Example:
        >>> isa_levels()[0]
        'portable'
    """
    return list(_compiled().isa_levels())


def threading() -> str:
    """Return whose threads run the loops: the process's OpenMP (torch's) or the kernel's own.

    A forked child, where the threads of its parent are missing, has its own.

    Example:
        >>> threading() in ("OpenMP of the process", "own threads")
        True
    """
    return str(_compiled().threading())


def compiled() -> Any:
    """Return the compiled module, for a front end whose arrays it reads itself; None where there is none.

    Example:
        >>> compiled() is None or callable(compiled().forward)
        True
    """
    return _core


def _compiled() -> ModuleType:
    if _core is None:
        raise ImportError(
            f"attnspan._core: expected the compiled module, got {_core_error}. Build it: pip install ."
        )
    return _core


def _packed(x: Any) -> Any:
    """The array itself where it is contiguous, else a contiguous copy."""
    if hasattr(x, "data_ptr"):
        return x.contiguous()
    return x if x.flags.c_contiguous else x.copy()


def _config(config: Mapping[str, int]) -> tuple[int, int, int]:
    unknown = sorted(set(config) - set(tuned.CONFIG_FIELDS))
    if unknown:
        raise ValueError(
            f"config: expected the keys {', '.join(tuned.CONFIG_FIELDS)}, got {', '.join(unknown)} as well. "
            "Take one of kernels.cpu.configs(...)"
        )
    block_q, block_k, threads = (config.get(name, 0) for name in tuned.CONFIG_FIELDS)
    return block_q, block_k, threads


def _options(options: Options) -> tuple[Any, ...]:
    def array(x: Any) -> Any:
        return None if x is None else _array(x)

    threshold = dropout.threshold(options.dropout_p) if options.dropout_p else 0
    return (
        options.softcap,
        array(options.bias),
        options.bias_kind,
        array(options.sinks),
        threshold,
        array(options.dropout_seed),
        array(options.q_index),
        array(options.k_index),
    )


def _array(x: Any) -> Any:
    """What the compiled module reads: the array itself if it can, else (address, dtype, shape, strides)."""
    if hasattr(type(x), "__dlpack_c_exchange_api__"):
        return x
    if hasattr(x, "data_ptr"):
        return x.data_ptr(), _DTYPE_CODES.get(str(x.dtype)[6:], -1), tuple(x.shape), x.stride()
    strides = tuple(s // x.itemsize for s in x.strides)
    return x.ctypes.data, _DTYPE_CODES.get(x.dtype.name, -1), x.shape, strides
