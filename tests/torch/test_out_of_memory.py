"""Where memory runs out in the kernel: MemoryError from every way in, and the process goes on."""

import sys

import pytest
from programs import run_program

pytestmark = [
    pytest.mark.compiled_module("its memory is what runs out"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it"),
]

PROGRAM = """
import resource
import torch
from attnspan import causal
from attnspan.kernels import cpu
from attnspan.torch import attention

allowed = 0  # megabytes

def room(megabytes):
    held = 4096 * int(open("/proc/self/statm").read().split()[0])
    limit = resource.RLIM_INFINITY if megabytes is None else held + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

def refused(call):
    room(allowed)
    try:
        call()
    except MemoryError:
        return True
    except RuntimeError as error:  # as which torch passes it on from 2.15 on
        return "bad_alloc" in str(error)
    finally:
        room(None)
    return False

torch.set_num_threads(2)
q = torch.randn(1, 1, 64, 64)
k = torch.randn(1, 1, 1, 64).expand(1, 1, 100_000, 64)  # the kernel's copy of the keys takes 50 MB
mask = causal().prepare(64, 100_000, like=q)
small = torch.randn(1, 2, 40, 16, requires_grad=True)
expected, = torch.autograd.grad(attention(small, small, small, mask=causal()).sum(), small)
leaf, out, lse = q.clone().requires_grad_(), torch.empty_like(q), torch.empty(1, 1, 64)

def backward():
    room(None)
    with torch.enable_grad():
        loss = attention(leaf, k, k, mask=mask).sum()
    room(allowed)
    loss.backward()

ways = {
    "eager": lambda: attention(q, k, k, mask=mask),
    "operator": lambda: torch.ops.attnspan.attention(q, k, k, mask.lowered.bounds, 0.1),
    "kernel": lambda: cpu.forward(q, k, k, mask.lowered.bounds, out, lse, scale=0.1, num_threads=2),
    "backward": backward,
}
for name, call in ways.items():
    for allowed in (0, 8):
        print(name, allowed, refused(call))
        again, = torch.autograd.grad(attention(small, small, small, mask=causal()).sum(), small)
        assert torch.equal(again, expected)
"""


@pytest.mark.slow
def test_every_way_in_raises_and_the_next_call_runs() -> None:
    ways = "eager", "operator", "kernel", "backward"
    wanted = [f"{way} {megabytes} True" for way in ways for megabytes in (0, 8)]
    assert run_program("-c", PROGRAM, timeout=120).splitlines() == wanted
