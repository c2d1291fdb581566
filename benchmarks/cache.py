"""A decoding step with a cache, compared with attention over exactly the valid keys and with torch.cat.

    python benchmarks/cache.py

A step writes one token per sequence and computes attention. "plain" writes nothing and lowers no mask, so no
cache can be faster. "cat" concatenates keys and values at each step. "static" and "rolling" build their mask
in each step. "shared mask" is the cost of a layer that uses the first layer's mask. Calls alternate. The
results are medians in milliseconds, and ratios to plain.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnspan import Prepared, cache, causal
from attnspan.torch import RollingCache, StaticCache, attention
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import Budget, Subject, interleave

HEADS, KV_HEADS, DIM = 8, 2, 64


def step(held: StaticCache | RollingCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = held.update(k, v)
    return attention(q, keys, values, mask=held.mask(1))


def shared_step(held: StaticCache | RollingCache, mask: Prepared, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = held.update(k, v)
    return attention(q, keys, values, mask=mask)


def cat_step(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2), mask=causal())


def calls(batch: int, length: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], object]]:
    """Name -> (a step that leads to ``length`` tokens, the cache to be set back by one)."""
    full = [torch.randn(batch, KV_HEADS, length, DIM, dtype=dtype) for _ in range(2)]
    q, k, v = (torch.randn(batch, heads, 1, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    static = StaticCache(batch, KV_HEADS, 2 * length, DIM, dtype=dtype)
    static.update(*(x[:, :, 1:] for x in full))
    rolling = RollingCache(batch, KV_HEADS, length - 1, DIM, chunk=2, dtype=dtype)
    for t in range(1, length + 7, 2):  # Write beyond the end, so that queries have two spans.
        rolling.update(*(x[:, :, t % (length - 1) :][:, :, :2] for x in full))
    compiled = torch.compile(step, fullgraph=True)
    mask, older = causal().prepare(1, length, like=q), [x[:, :, 1:] for x in full]
    static_mask = (causal() & cache(static.lengths + 1)).prepare(1, 2 * length, batch=batch, like=q)
    return {
        "plain": (lambda: attention(q, *full, mask=mask), None),
        "static": (lambda: step(static, q, k, v), static),
        "static, compiled": (lambda: compiled(static, q, k, v), static),
        "static, shared mask": (lambda: shared_step(static, static_mask, q, k, v), static),
        "rolling": (lambda: step(rolling, q, k, v), rolling),
        "rolling, compiled": (lambda: compiled(rolling, q, k, v), rolling),
        "cat": (lambda: cat_step(*older, q, k, v), None),
    }


def measure(batch: int, length: int, dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Measure the median milliseconds of each step."""
    torch._dynamo.reset()
    subjects = []
    for name, (call, held) in calls(batch, length, dtype).items():
        call()
        set_back(held)
        subjects.append(Subject(name, call, Device(), lambda held=held: restored(held)))
    # A sample is one step, whose token is then removed.
    found = interleave(subjects, Budget(seconds / len(subjects), rounds=200, sample_seconds=1e-9))
    return {each.peer: each.execute.median * 1e3 for each in found if each.execute}


def set_back(held: object) -> None:
    if isinstance(held, StaticCache | RollingCache):
        held.truncate(held.lengths - 1)


@contextmanager
def restored(held: object) -> Iterator[None]:
    yield
    set_back(held)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each row of the table")
    parser.add_argument("--lengths", default="128,1024,8192", help="valid keys of each row")
    parser.add_argument("--batches", default="1,8")
    options = parser.parse_args()
    with torch.inference_mode():
        for batch in map(int, options.batches.split(",")):
            for length in map(int, options.lengths.split(",")):
                for dtype in (torch.float32, torch.bfloat16):
                    found = measure(batch, length, dtype, options.seconds)
                    cells = "  ".join(
                        f"{name} {ms:.3f} ({ms / found['plain']:.2f}x)" for name, ms in found.items()
                    )
                    print(f"{batch} x {length:>5} {str(dtype)[6:]:>8}:  {cells}", flush=True)


if __name__ == "__main__":
    main()
