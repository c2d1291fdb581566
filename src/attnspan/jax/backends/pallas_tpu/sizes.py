"""How many rows and keys a tile has: what fits into a core's vector memory."""

from ....call import Problem

#: What a kernel may use of a core's vector memory, bytes: compilers give a kernel 16 MiB unless told
#: otherwise, and keep some of it for themselves.
BUDGET = 12 * 2**20

#: Rows and keys of a tile are along lanes somewhere, so they come in 128.
LANES = 128

_SIZES = (128, 256, 512)
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


def default(problem: Problem, direction: str) -> tuple[int, int]:
    """Square tiles of 512, or the largest that fit: each score then meets 256 flops per byte of k and v.

    Args:
        problem: The call.
        direction: ``"forward"`` or ``"backward"``, whose three kernels share one size.

    Returns:
        Rows and keys of a tile, multiples of 128 up to the lengths rounded up.

    Example:
        >>> default(Problem(1, 8, 8, 4096, 200, 128, 128, 1, "float32", "tpu"), "backward")
        (512, 256)
    """
    q_sizes, k_sizes = (_sizes(length) for length in (problem.q_len, problem.k_len))
    # The smallest tile always fits, up to the largest head dim that is taken.
    fitting = [(q, k) for q in q_sizes for k in k_sizes if vmem_bytes(problem, direction, q, k) <= BUDGET]
    return max(fitting, key=lambda size: (size[0] * size[1], size[0]))


def _sizes(length: int) -> tuple[int, ...]:
    """Sizes up to the length rounded up; a tile beyond it would be empty."""
    return tuple(size for size in _SIZES if size < length + size // 2) or _SIZES[:1]
