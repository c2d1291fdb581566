"""The core reads what it checked, whatever other threads write into the caller's arrays meanwhile.

Programs of their own: what these tests are about ends a process.
"""

import pytest
from programs import run_program

# Puts anything into integer arrays while `call` runs without the GIL, half of the time; else they are legal.
COMMON = """
import threading
import time
import numpy as np
from attnspan.kernels import cpu

random = np.random.default_rng(0)

def race(call, *arrays, times=20):
    stop = threading.Event()

    def spoil():
        random = np.random.default_rng(1)
        legal = [x.copy() for x in arrays]
        while not stop.is_set():
            for x in arrays:
                x.reshape(-1)[random.integers(x.size, size=8)] = random.integers(-2**31, 2**31 - 1, 8)
            time.sleep(1e-4)
            for x, good in zip(arrays, legal):
                x[...] = good
            time.sleep(1e-4)

    thread = threading.Thread(target=spoil)
    thread.start()
    computed, end = 0, time.monotonic() + 20
    while computed < times and time.monotonic() < end:
        try:
            call()
            computed += 1
        except ValueError as error:
            assert "mask bounds" in str(error) or "expected numbers below" in str(error), error
    stop.set()
    thread.join()
    assert computed > 0
"""

MASK = """
B, H, S, D = 1, 2, 700, 16
q, k, v, out, dq, dk, dv = (random.standard_normal((B, H, S, D), "float32") for _ in range(7))
lse = np.zeros((B, H, S), "float32")
rows = np.arange(S)
bounds = np.zeros((B, H, S, 2, 2), "int32")  # a window, for which threads make room: it must not widen
bounds[..., 1, 0], bounds[..., 1, 1] = np.maximum(rows - 20, 0), rows + 1
few_bounds = bounds[:, :, 200:208].copy()
few, few_out, few_lse = q[:, :, :8], out[:, :, :8], np.zeros((B, H, 8), "float32")

def forward():
    cpu.forward(q, k, v, bounds, out, lse, scale=0.25, num_threads=2)

def backward():
    cpu.backward(q, None, q, k, v, out, lse, bounds, dq, dk, dv, scale=0.25, num_threads=2)

def decode():
    cpu.forward(few, k, v, few_bounds, few_out, few_lse, scale=0.25, num_threads=2)

forward()
race(forward, bounds)
race(backward, bounds)
race(decode, few_bounds, times=300)
k[0, 0, 9, 0] = np.nan  # its rows are computed one by one
race(forward, bounds)
race(backward, bounds)
"""

ROWS = """
n = 100_000
source, target = random.standard_normal((1, n, 1, 1, 16), "float32"), np.zeros((1, n, 1, 1, 16), "float32")
to, at = (random.permutation(n).astype("int32") for _ in range(2))
race(lambda: cpu.move_rows(target, to, source, at, num_threads=2), to, at)
"""


@pytest.mark.slow
@pytest.mark.compiled_module("it shares memory with Python's threads")
def test_another_thread_writes_into_what_was_checked() -> None:
    run_program("-W", "error", "-c", COMMON + MASK + ROWS, timeout=120)


EMPTY = """
import numpy as np
from attnspan.kernels import cpu

def array(*shape, dtype="float32"):
    return np.ones(shape, dtype)

described = cpu._array
for B, H, Sq, Sk in ((0, 4, 5, 7), (2, 0, 5, 7), (2, 4, 0, 7), (2, 4, 5, 0)):
    q, out, dq = (array(B, H, Sq, 8) for _ in range(3))
    k, v, dk, dv = (array(B, 2, Sk, 8) for _ in range(4))
    lse, bounds = array(B, H, Sq), np.zeros((B, H, Sq, 1, 2), "int32")
    core = cpu.core
    core.forward(*map(described, (q, k, v, out, lse, bounds)), 1.0, 2)
    core.backward(described(q), None, *map(described, (q, k, v, out, lse, bounds, dq, dk, dv)), 1.0, 2)
    for x in (out, dq, dk, dv):
        assert not x.any()
"""


@pytest.mark.compiled_module("what is called is its edge")
def test_the_core_takes_calls_without_rows_or_keys() -> None:
    run_program("-W", "error", "-c", EMPTY, timeout=60)
