"""Forked and spawned children and 64 threads at once compute. Threads of a parent do not survive a fork."""

from pathlib import Path

import pytest
from programs import run_program

# One process, as each takes seconds to start. A spawned child runs this file too, before it has seen a mask.
PROGRAM = """
import multiprocessing, os, signal, sys, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")  # that is what is tested
import numpy as np
import torch
from attnspan import causal, segments, window
from attnspan.kernels import cpu
from attnspan.parallel import Layout
from attnspan.torch import _lowered, attention

x = torch.randn(1, 4, 64, 32, generator=torch.Generator().manual_seed(0))  # too few for torch's own loops

def step():
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out = attention(q, k, v, mask=causal())
    out.backward(x)
    return torch.stack([out.detach(), q.grad, k.grad, v.grad])

def forked(call):  # whether a child hangs or fails
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if call() else 1)
    return os.waitpid(child, 0)[1] != 0

def after_the_parent_computed():
    torch.set_num_threads(2)
    expected = step()
    assert not forked(lambda: torch.equal(step(), expected))
    assert torch.equal(step(), expected)  # and the parent goes on

def problem(i):
    torch.set_num_threads(1 + i % 3)
    x = torch.randn(1, 2, 16 + 13 * i, 16, generator=torch.Generator().manual_seed(i))
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    out, lse = attention(q, k, v, mask=causal() & window(1 + i % 7), return_lse=True)
    out.backward(x)
    return [x.detach() for x in (out, lse, q.grad, k.grad, v.grad)]

def threads_at_once():  # which share masks and scratch memory
    expected, start = [problem(i) for i in range(64)], threading.Barrier(64)
    sys.setswitchinterval(1e-5)

    def together(i):
        start.wait()
        return [problem(i) for _ in range(3)]

    with ThreadPoolExecutor(64) as pool:
        for found, wanted in zip(pool.map(together, range(64)), expected, strict=True):
            assert all(torch.equal(a, b) for one in found for a, b in zip(one, wanted, strict=True))
    sys.setswitchinterval(5e-3)

def attended(pipe, q, *masks):
    pipe.send([attention(q, q, q, mask=mask).numpy() for mask in masks])

def spawned():  # unpickles masks
    q, expression = torch.randn(1, 2, 40, 16), segments((torch.arange(40) // 9)[None])
    masks = expression, expression.prepare(40, 40, like=q)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=attended, args=(theirs, q, *masks))
    process.start()
    assert ours.poll(100), "the child hangs"
    for found, mask in zip(ours.recv(), masks, strict=True):
        assert torch.equal(torch.from_numpy(found), attention(q, q, q, mask=mask))

class Slow(type(_lowered._memory._static)):  # what the lock guards takes as long as a fork
    def __setitem__(self, key, value):
        time.sleep(1e-3)
        super().__setitem__(key, value)

def natural():
    return Layout.contiguous(4, ranks=2).is_natural

def while_others_hold_locks():
    q, done = torch.zeros(1, 1, 4, 8), threading.Event()
    _lowered._memory._static = Slow()
    vars(Layout)["is_natural"].func = lambda layout: time.sleep(1e-3) is None

    def lower(first):
        while not done.is_set():
            attention(q, q, q, mask=window(first))
            assert natural()
            first += 3

    def child():
        attention(q, q, q, mask=window(10**6))
        return natural()

    threads = [threading.Thread(target=lower, args=(first,), daemon=True) for first in range(3)]
    [thread.start() for thread in threads]
    hung = sum(forked(child) for i in range(30))
    done.set()
    [thread.join() for thread in threads]
    assert hung == 0, f"{hung} children hang"

def exit_while_a_thread_computes():
    # The kernel alone: a thread that is in one of torch's own functions at the exit aborts the process.
    started, q = threading.Event(), np.ones((1, 8, 512, 64), "float32")
    bounds = np.broadcast_to(np.array([0, 512], "int32"), (1, 1, 512, 1, 2)).copy()
    out, lse = np.empty_like(q), np.empty(q.shape[:3], "float32")

    def run():
        while True:
            started.set()
            cpu.forward(q, q, q, bounds, out, lse, scale=0.125, num_threads=2)

    threading.Thread(target=run, daemon=True).start()
    started.wait()

if __name__ == "__main__":
    tests = after_the_parent_computed, threads_at_once, spawned, while_others_hold_locks
    for test in (*tests, exit_while_a_thread_computes):
        print(test.__name__, flush=True)
        test()
"""


@pytest.mark.slow
@pytest.mark.compiled_module("its threads")
def test_processes_and_threads(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    said = run_program("-W", "error", str(tmp_path / "program.py"), timeout=400)
    assert said.split()[-1] == "exit_while_a_thread_computes"
