"""How many rows and keys a tile has: what fits, what is worth trying, and what tuning found here."""

from collections.abc import Mapping
from functools import lru_cache

import jax

from ....call import Problem
from ....kernels.tuned import Key, length_bucket, lookup, mask_kind
from .. import Static

FIELDS = ("block_q", "block_k")

#: What a kernel may use of a core's vector memory, bytes: compilers give a kernel 16 MiB unless told
#: otherwise, and keep some of it for themselves.
BUDGET = 12 * 2**20

#: Rows and keys of a tile are along lanes somewhere, so they come in 128.
LANES = 128

_SIZES = (128, 256, 512, 1024)
_WIDTH = {"float32": 4, "bfloat16": 2}


def vmem_bytes(problem: Problem, direction: str, block_q: int, block_k: int) -> int:
    """What a kernel holds in vector memory, estimated.

    Blocks of q, k, v (and of dout and a result) twice, because the next is copied while one is used; sums in
    float32; and of the tile itself scores, weights and what they are made of: 4 tiles of float32 forward, 6
    backward. Head dims fill whole lanes of 128.

    Example:
        >>> problem = Problem(1, 8, 8, 4096, 4096, 128, 128, 1, "bfloat16", "tpu")
        >>> vmem_bytes(problem, "forward", 512, 512) / 2**20
        5.25
    """
    width = _WIDTH[problem.dtype]
    dim, v_dim = (-(-d // LANES) * LANES for d in (problem.head_dim, problem.v_dim))
    tiles = 4 * block_q * block_k * (4 if direction == "forward" else 6)
    if direction == "forward":
        copied = block_q * (dim + v_dim) + block_k * (dim + v_dim)
        sums = block_q * v_dim
    else:
        copied = block_q * (dim + v_dim) + 2 * block_k * (dim + v_dim)
        sums = block_k * (dim + v_dim)
    return tiles + 2 * width * copied + 4 * sums


def configs(problem: Problem, direction: str) -> list[dict[str, int]]:
    """The configurations that are worth trying, those that fit.

    Args:
        problem: The call.
        direction: ``"forward"`` or ``"backward"``, whose three kernels share one.

    Returns:
        Rows and keys of a tile, multiples of 128.

    Example:
        >>> problem = Problem(1, 8, 8, 200, 4096, 128, 128, 1, "bfloat16", "tpu")
        >>> configs(problem, "backward")[-1]
        {'block_q': 256, 'block_k': 1024}
    """
    q_sizes, k_sizes = (_sizes(length) for length in (problem.q_len, problem.k_len))
    return [
        {"block_q": block_q, "block_k": block_k}
        for block_q in q_sizes
        for block_k in k_sizes
        if vmem_bytes(problem, direction, block_q, block_k) <= BUDGET
    ]


def default(problem: Problem, direction: str) -> dict[str, int]:
    """Square tiles of 512, or the largest that fit: each score then meets 256 flops per byte of k and v.

    Example:
        >>> default(Problem(1, 8, 8, 4096, 4096, 128, 128, 1, "float32", "tpu"), "backward")
        {'block_q': 512, 'block_k': 512}
    """
    found = [each for each in configs(problem, direction) if max(each["block_q"], each["block_k"]) <= 512]
    # At least one is there: the smallest tile always fits, up to the largest head dim that is taken.
    return max(found, key=lambda each: (each["block_q"] * each["block_k"], each["block_q"]))


def chosen(problem: Problem, static: Static, direction: str) -> dict[str, int]:
    """What tuning found for this call on this device, or the default.

    Example:
        >>> problem = Problem(1, 8, 8, 4096, 4096, 128, 128, 1, "bfloat16", "tpu")
        >>> chosen(problem, Static(scale=1.0), "forward")
        {'block_q': 512, 'block_k': 512}
    """
    device = device_kind()
    found = None if device is None else tuned(device).get(key(problem, static, direction, device))
    return dict(found) if found else default(problem, direction)


def key(problem: Problem, static: Static, direction: str, device: str) -> Key:
    """The calls that share a configuration.

    How much a mask shows is known only where it is known in words; one that is data counts as "sparse".

    Example:
        >>> problem = Problem(1, 8, 8, 4096, 4096, 128, 128, 1, "bfloat16", "tpu")
        >>> str(key(problem, Static(scale=1.0, mask=("causal",)), "forward", "TPU v5 lite"))
        'pallas forward TPU v5 lite bfloat16 D=128 S<=4096 half'
    """
    rows, keys, words = problem.q_len, problem.k_len, static.mask
    pairs = 0.0
    if words == ("full",):
        pairs = float(rows * keys)
    elif words == ("causal",):
        pairs = rows * keys / 2
    return Key(
        "pallas",
        direction,
        device,
        problem.dtype,
        problem.head_dim,
        length_bucket(keys),
        mask_kind(rows, keys, pairs),
    )


def device_kind() -> str | None:
    """The kind of TPU that calls are compiled for, as JAX names it; None where there is none.

    Example:
        >>> device_kind() is None or "TPU" in device_kind()
        True
    """
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else None


@lru_cache(maxsize=8)
def tuned(device: str) -> Mapping[Key, Mapping[str, int]]:
    """The tuned configurations of a kind of device, read once, by key.

    Args:
        device: Of `device_kind`.

    Example:
        >>> dict(tuned("a device that was never tuned"))
        {}
    """
    return {key: config for key, config in lookup("pallas", device).items() if _is_legal(config)}


def _is_legal(config: Mapping[str, int]) -> bool:
    return set(config) == set(FIELDS) and all(x > 0 and x % LANES == 0 for x in config.values())


def _sizes(length: int) -> tuple[int, ...]:
    """Sizes up to the length rounded up; a tile beyond it would be empty."""
    return tuple(size for size in _SIZES if size < length + size // 2) or _SIZES[:1]
