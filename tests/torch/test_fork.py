"""Forked and spawned children and 64 threads at once compute. Threads of a parent do not survive a fork."""

from pathlib import Path

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


# A spawned child unpickles masks and tensors before it has seen the library.
SPAWNED = """
import sys
import torch.multiprocessing as multiprocessing
from attnspan import segments
from attnspan.torch import attention
import torch

def child(pipe, q, *masks):
    pipe.send([attention(q, q, q, mask=mask).numpy() for mask in masks])

if __name__ == "__main__":
    q, expression = torch.randn(1, 2, 40, 16), segments((torch.arange(40) // 9)[None])
    masks = expression, expression.prepare(40, 40, like=q)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=child, args=(theirs, q, *masks))
    process.start()
    assert ours.poll(60), "the child hangs"
    for found, mask in zip(ours.recv(), masks, strict=True):
        assert torch.equal(torch.from_numpy(found), attention(q, q, q, mask=mask))
    process.join(30)
    assert process.exitcode == 0
    print("done")
"""

# Each thread has a problem of its own and shares the process, masks and scratch memory with 63 others.
THREADS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from attnspan import window

def problem(i):
    torch.set_num_threads(1 + i % 3)
    x = torch.randn(1, 2, 16 + 13 * i, 16, generator=torch.Generator().manual_seed(i))
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out, lse = attention(q, k, v, mask=causal() & window(1 + i % 7), return_lse=True)
    out.backward(x)
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad)]

def together(i):
    start.wait()
    return [problem(i) for _ in range(5)]

expected, start = [problem(i) for i in range(64)], Barrier(64)
with ThreadPoolExecutor(64) as pool:
    for found, wanted in zip(pool.map(together, range(64)), expected, strict=True):
        for one in found:
            assert all(torch.equal(a, b) for a, b in zip(one, wanted, strict=True))
print("done")
"""


# Children are forked while other threads hold the library's locks, and compute something each.
BUSY = """
import os, signal, threading, time, warnings
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
import torch
from attnspan import window
from attnspan.parallel import Layout
from attnspan.torch import _lowered, attention

q = torch.zeros(1, 1, 4, 8)
class Slow(type(_lowered._memory._static)):  # what the lock guards takes as long as a fork
    def __setitem__(self, key, value):
        time.sleep(1e-3)
        super().__setitem__(key, value)
_lowered._memory._static = Slow()

def slow(layout):
    time.sleep(1e-3)
    return True
vars(Layout)["is_natural"].func = slow

done = threading.Event()
def lower(first):
    while not done.is_set():
        attention(q, q, q, mask=window(first))
        assert Layout.contiguous(4, ranks=2).is_natural
        first += 3

threads = [threading.Thread(target=lower, args=(first,), daemon=True) for first in range(3)]
[thread.start() for thread in threads]
hung, until = 0, time.monotonic() + 60
for i in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(4)
        attention(q, q, q, mask=window(10**6 + i))
        os._exit(0 if Layout.contiguous(4, ranks=2).is_natural else 1)
    hung += os.waitpid(child, 0)[1] != 0
    if hung > 3 or time.monotonic() > until:
        break
done.set()
[thread.join() for thread in threads]
print(f"{hung} of {i + 1} children hung")
"""


@pytest.mark.slow
def test_a_child_forked_while_others_lower_finds_no_lock_held() -> None:
    assert run_program("-c", BUSY, timeout=120).strip() == "0 of 40 children hung"


@pytest.mark.slow
def test_a_spawned_child_attends_under_the_masks_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    assert run_program("-W", "error", str(tmp_path / "spawned.py"), timeout=120).split() == ["done"]


@pytest.mark.slow
def test_a_forked_child_attends_after_its_parent_did_and_then_64_threads_at_once() -> None:
    program = COMMON + PROCESSES + THREADS
    assert run_program("-W", "error", "-c", program, timeout=300).split() == ["done", "done"]


@pytest.mark.long
def test_forked_workers_of_a_loader_attend() -> None:
    assert run_program("-W", "error", "-c", COMMON + LOADER, timeout=120).split() == ["done"]


@pytest.mark.slow
@pytest.mark.compiled_module("the exit of the process that the kernel runs in")
def test_the_interpreter_exits_while_a_daemon_thread_computes() -> None:
    # The kernel alone: a thread that is in one of torch's own functions at the exit aborts the process.
    program = """
import threading
import numpy as np
from attnspan.kernels import cpu
started, q = threading.Event(), np.ones((1, 8, 512, 64), "float32")
bounds = np.broadcast_to(np.array([0, 512], "int32"), (1, 1, 512, 1, 2)).copy()
out, lse = np.empty_like(q), np.empty(q.shape[:3], "float32")

def run():
    while True:
        started.set()
        cpu.forward(q, q, q, bounds, out, lse, scale=0.125, num_threads=2)

threading.Thread(target=run, daemon=True).start()
started.wait()
"""
    run_program("-c", program)
