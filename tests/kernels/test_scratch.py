"""How much memory a pass takes beside its arrays."""

import pytest
from programs import run_program

# By how many MiB gradients raise the peak of the process; 65,536 rows see a window, arrays are 16 MiB each.
PROGRAM = """
import resource
import torch
from attnspan import causal, window
from attnspan.torch import attention

torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 65536, 64, requires_grad=True) for _ in range(3))
out = attention(q, k, v, mask=causal() & window(256))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out.backward(torch.ones_like(out))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.compiled_module("its scratch")
def test_gradients_of_a_long_window_take_memory_for_what_it_sees() -> None:
    """Each 768 keys sum a dQ of their own: of the rows that see them, not of all (16 MiB, 86 times)."""
    grown = int(run_program("-c", PROGRAM, timeout=120))
    assert grown < 256, f"{grown} MiB"
