"""Long results are fresh memory, which the system maps page by page. The kernel asks for pages of 2 MiB."""

from pathlib import Path

import pytest
import torch

import attnspan
from attnspan.kernels import cpu
from attnspan.torch import attention

SMAPS = Path("/proc/self/smaps")
TOKENS, HEADS, DIM = 131_072, 2, 64  # 64 MiB for each array: more than glibc keeps for the next call

pytestmark = [
    pytest.mark.skipif(cpu.core is None, reason="needs the compiled kernel"),
    pytest.mark.skipif(
        not SMAPS.exists() or "VmFlags" not in SMAPS.read_text(),
        reason="only Linux tells the flags of memory",
    ),
]


def flags_at(address: int) -> set[str]:
    """The flags of the mapping that contains an address. "hg" asks for pages of 2 MiB."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            start, end = (int(x, 16) for x in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"no mapping contains {address:#x}")


@pytest.mark.slow
def test_long_results_ask_for_large_pages() -> None:
    mask = attnspan.window(32) & attnspan.causal()
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, mask=mask)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        middle = x.data_ptr() + x.numel() * x.element_size() // 2
        assert "hg" in flags_at(middle), name
    assert "hg" not in flags_at(q.data_ptr() + 2**25)  # what the caller made stays as it is
