"""Decoding step with a paged KV cache, compared with a contiguous cache, copies, and a loop over requests.

    python benchmarks/paged.py

Requests have 4,096 to 16,384 keys, and pages are in random order. "pages" reads the pages in place. "one
piece" is attention over a contiguous cache, which uses memory pages of 2 MiB like "pages". "tensors" is the
same over ordinary torch tensors. "copy" gathers all pages at each step. "loop" gathers the pages of each
request and calls torch's attention, like servers without a paged kernel. Calls alternate. The results are
medians in milliseconds, and the speedup of "pages" over each.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan import cache, causal
from attnspan.torch import PagedCache, StaticCache, attention
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import Budget, Subject, interleave
from attnspan_lab.files import write_json

HEADS, KV_HEADS, DIM = 32, 8, 128


def filled(requests: int, page: int, dtype: torch.dtype, most: int) -> PagedCache:
    """Make a cache with random contents and pages in random order."""
    lengths = torch.linspace(most // 4, most, requests).int()
    held = PagedCache(
        requests * (most // page), page, KV_HEADS, DIM, batch=requests, max_len=most, dtype=dtype
    )
    held._keys.normal_(), held._values.normal_()
    order = torch.randperm(requests * (most // page)).view(requests, -1).int()
    held.table.copy_(order)
    held.lengths.copy_(lengths)
    for row, length in zip(held.table, lengths.tolist(), strict=True):
        row[-(-length // page) :] = -1
    return held


def looped(held: PagedCache, q: Tensor) -> Tensor:
    """Process one request after the other."""
    out, page = torch.empty_like(q), held._keys.shape[2]
    for b, length in enumerate(held.lengths.tolist()):
        pages = held.table[b, : -(-length // page)]
        k, v = (
            x.transpose(0, 1)[:, pages].flatten(1, 2)[None, :, :length] for x in (held._keys, held._values)
        )
        out[b] = scaled_dot_product_attention(q[b : b + 1], k, v, enable_gqa=True)[0]
    return out


def measure(requests: int, page: int, dtype: torch.dtype, most: int, budget: Budget) -> tuple[str, Any]:
    held = filled(requests, page, dtype, most)
    q = torch.randn(requests, HEADS, 1, DIM, dtype=dtype)
    # Empty slots hold zeros, which no query reads.
    k, v = (x.nan_to_num().contiguous() for x in held.gathered())
    whole = StaticCache(requests, KV_HEADS, k.shape[2], DIM, dtype=dtype)
    whole._keys.copy_(k), whole._values.copy_(v)
    mask = (causal() & cache(held.lengths)).prepare(1, k.shape[2], batch=requests, like=q)
    calls: dict[str, Callable[[], object]] = {
        "pages": lambda: held.attention(q, mask=mask),
        "one piece": lambda: attention(q, whole._keys, whole._values, mask=mask),
        "tensors": lambda: attention(q, k, v, mask=mask),
        "copy": lambda: attention(q, *held.gathered(), mask=mask),
        "loop": lambda: looped(held, q),
    }
    wanted = calls["one piece"]()
    for name, call in calls.items():
        torch.testing.assert_close(call(), wanted, rtol=0.05, atol=0.05, msg=name)
    found = interleave([Subject(name, call, Device()) for name, call in calls.items()], budget)
    named = dict(zip(calls, found, strict=True))
    times = "  ".join(f"{name} {x.execute.median * 1e3:8.2f} ms" for name, x in named.items())
    ratios = "  ".join(f"{name} {x.ratio.median:5.2f}" for name, x in list(named.items())[1:])
    case = f"{str(dtype)[6:]:9}{requests:>3} requests  pages of {page:>3}"
    return f"{case}  {times}  | {ratios}", {name: x.execute.samples for name, x in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each row")
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--most", type=int, default=16384, help="number of keys of the longest request")
    parser.add_argument("--json", type=Path, help="write raw samples in seconds to this file")
    given = parser.parse_args()
    torch.manual_seed(0)
    kept: dict[str, Any] = {}
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            for requests in given.requests:
                for page in (16, 64, 256):
                    case = f"{str(dtype)[6:]}:{requests}:{page}"
                    row, kept[case] = measure(
                        requests, page, dtype, given.most, Budget(seconds=given.seconds)
                    )
                    print(row, flush=True)
                    if given.json:
                        write_json(given.json, kept)


if __name__ == "__main__":
    main()
