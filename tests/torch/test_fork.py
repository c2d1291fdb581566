"""A forked child computes: the threads of its parent do not survive the fork, and nobody waits for them."""

import pytest
from programs import run_program

COMMON = """
import warnings
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")  # that is what is tested
import torch
from attnspan import causal
from attnspan.torch import attention

x = torch.randn(1, 4, 64, 32, generator=torch.Generator().manual_seed(0))  # too few for torch's own loops

def step():
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out = attention(q, k, v, mask=causal())
    out.backward(x)
    return torch.stack([out.detach(), q.grad, k.grad, v.grad])

torch.set_num_threads(2)
expected = step()
"""

PROCESSES = """
import multiprocessing

def child(pipe):
    pipe.send(bool(torch.equal(step(), expected)))

fork = multiprocessing.get_context("fork")
ours, theirs = fork.Pipe()
process = fork.Process(target=child, args=(theirs,))
process.start()
process.join(30)
if process.is_alive():
    process.kill()
    raise SystemExit("the child hangs")
assert process.exitcode == 0
assert ours.recv()
assert torch.equal(step(), expected)  # and the parent goes on
print("done")
"""

LOADER = """
from torch.utils.data import DataLoader, Dataset

class Attended(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return step()[0, 0, 0, i]

def start(worker):
    torch.set_num_threads(2)  # a worker begins with one

loader = DataLoader(
    Attended(), batch_size=1, num_workers=2, multiprocessing_context="fork", timeout=30, worker_init_fn=start
)
rows = torch.cat(list(loader))
assert torch.equal(rows, expected[0, 0, 0, :4])
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [PROCESSES, pytest.param(LOADER, marks=pytest.mark.long)],
    ids=["multiprocessing", "DataLoader"],
)
def test_a_forked_child_attends_after_its_parent_did(program: str) -> None:
    assert run_program("-W", "error", "-c", COMMON + program, timeout=120).split() == ["done"]
