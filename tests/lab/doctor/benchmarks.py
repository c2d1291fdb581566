"""Dishonest benchmarks, each with an honest twin. The line that the doctor must name ends in ``# here``."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A benchmark with one mistake.

    Args:
        kind: Kind of the finding.
        sick: Source with the mistake.
        healthy: Source without it.
    """

    kind: str
    sick: str
    healthy: str


_JAX = """
import jax, jax.numpy as jnp, time
from statistics import median
@jax.jit
def attend(q):
    return jax.nn.softmax(q @ q.T) @ q
q = jnp.ones((1000, 64))
"""
_CAPTURED = (
    _JAX + "import numpy as np\nn = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)\n"
)
_TORCH = """
import time, timeit, torch
from statistics import median
import torch.nn.functional as F
def attend(q):
    return F.scaled_dot_product_attention(q, q, q)
q = torch.ones(1, 2, 64, 16)
"""
_WARM = "jax.block_until_ready(attend(q))\n"
_LAPS = """
laps = []
for _ in range(9):
    start = time.perf_counter()
    {}  # here
    laps.append(time.perf_counter() - start)
print(f"{{{}(laps):.9f}} s")
"""
_LOOP = """
start = time.perf_counter()
for _ in range(10):  # here
    {}
{}
print((time.perf_counter() - start) / 10)
"""
_BLOCK = "jax.block_until_ready(out)"
_FIRST = """
known = {}
def attend(q):
    if q not in known:
        time.sleep(0.2)  # as a search for the fastest kernel
        known[q] = True
    time.sleep(0.001)
    return q
q = 1
mean = lambda x: sum(x) / len(x)
"""
# A device that computes in 1 ms, and whose results take another 9 ms to arrive.
_FAR = """
import time, jax
class Far:
    shape, dtype, busy = (), "float32", 0.0
    def __init__(self):
        self.at = 0.0
        Far.busy = max(Far.busy, time.perf_counter()) + 0.001
        self.at = Far.busy + 0.009
    def is_ready(self): return time.perf_counter() >= self.at
    def is_deleted(self): return False
    def devices(self): return jax.devices()
    def block_until_ready(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))
        return self
"""
_SLEEP = """
from time import sleep, {0} as clock
start = clock()
sleep(0.01)  # here
print(clock() - start)
"""
_FUNCTION = """
def run():
    {}
    start = time.perf_counter()
    {}
    return time.perf_counter() - start
print(median(run() for _ in range(9)))
"""
_TIMER = """
class Timer:
    def __enter__(self):
        self.start = time.time()
        return self
    def __exit__(self, *_):
        self.took = time.time() - self.start
{}
with Timer() as timer:
    attend(q)  # here
print(timer.took)
"""
BENCHMARKS = {
    "compilation in a loop": Benchmark(
        "compile-counted",
        _JAX + _LOOP.format("out = attend(q)", _BLOCK),
        _JAX + _WARM + _LOOP.format("out = attend(q)", _BLOCK),
    ),
    "a mean with the first sample": Benchmark(
        "compile-counted",
        _JAX + "mean = lambda x: sum(x) / len(x)\n" + _LAPS.format("attend(q).block_until_ready()", "mean"),
        _JAX + _LAPS.format("attend(q).block_until_ready()", "median"),
    ),
    "a new function in each call": Benchmark(
        "compile-counted",
        _JAX + _LOOP.format("out = jax.jit(lambda q: q @ q.T + 1)(q)", _BLOCK),
        _JAX + "f = jax.jit(lambda q: q @ q.T + 1)\nf(q)\n" + _LOOP.format("out = f(q)", _BLOCK),
    ),
    "timeit compiles": Benchmark(
        "compile-counted",
        _TORCH + "f = torch.compile(attend, backend='aot_eager')\n"
        "print(timeit.timeit(lambda: f(q), number=20))  # here",
        _TORCH + "f = torch.compile(attend, backend='aot_eager')\nf(q)\n"
        "print(timeit.timeit(lambda: f(q), number=20))  # here",
    ),
    "results are dropped": Benchmark(
        "not-waited",
        _JAX + _WARM + _LOOP.format("attend(q)", ""),
        _JAX + _WARM + _LOOP.format("attend(q).block_until_ready()", ""),
    ),
    "the last result is not waited for": Benchmark(
        "not-waited",
        _JAX + _WARM + _LOOP.format("out = attend(q)", ""),
        _JAX + _WARM + _LOOP.format("out = attend(q)", _BLOCK),
    ),
    "samples without a wait": Benchmark(
        "not-waited",
        _JAX + _WARM + _LAPS.format("attend(q)", "median"),
        _JAX + _WARM + _LAPS.format("attend(q).block_until_ready()", "median"),
    ),
    "a wait for each call": Benchmark(
        "waited-each-call",
        _FAR + _LOOP.format("Far().block_until_ready()", ""),
        _FAR + _LOOP.format("out = Far()", "out.block_until_ready()"),
    ),
    "random inputs": Benchmark(
        "inputs-counted",
        _TORCH + "attend(q)\n" + _LOOP.format("attend(torch.randn(3000, 1000)[None, None, :64, :16])", ""),
        _TORCH
        + "attend(q)\nx = torch.randn(3000, 1000)[None, None, :64, :16]\n"
        + _LOOP.format("attend(x)", ""),
    ),
    "a transfer": Benchmark(
        "inputs-counted",
        "import numpy as np\n"
        + _JAX
        + "n = np.ones((3000, 1000))\n"
        + _LAPS.format("jax.block_until_ready(jnp.asarray(n)[:8, :8] + 1)", "median"),
        "import numpy as np\n"
        + _JAX
        + "n = jnp.asarray(np.ones((3000, 1000)))\n"
        + _LAPS.format("jax.block_until_ready(n[:8, :8] + 1)", "median"),
    ),
    "inputs in a function": Benchmark(
        "inputs-counted",
        _TORCH + _FUNCTION.format("", "x = torch.rand(3000, 1000)  # here\n    y = attend(q)"),
        _TORCH + _FUNCTION.format("x = torch.rand(3000, 1000)", "y = attend(q)"),
    ),
    "a part of the results": Benchmark(
        "result-unused",
        _JAX + "f = jax.jit(lambda q: (q @ q.T @ q, q + 1)[1])\nf(q)\n" + _LOOP.format("out = f(q)", _BLOCK),
        _JAX + "f = jax.jit(lambda q: (q @ q.T @ q, q + 1))\nf(q)\n" + _LOOP.format("out = f(q)", _BLOCK),
    ),
    "a loop in the compiled function": Benchmark(
        "result-unused",
        _JAX
        + "f = jax.jit(lambda q: [attend(q + i) for i in range(4)][-1])\nf(q)\n"
        + _LOOP.format("out = f(q)", _BLOCK),
        _JAX
        + "f = jax.jit(lambda q: [attend(q + i) for i in range(4)])\nf(q)\n"
        + _LOOP.format("out = f(q)", _BLOCK),
    ),
    "arrays that the function captures": Benchmark(
        "result-constant",
        _CAPTURED + "f = jax.jit(lambda: attend(n))\nf()\n" + _LOOP.format("out = f()", _BLOCK),
        _CAPTURED + "attend(n)\n" + _LOOP.format("out = attend(n)", _BLOCK),
    ),
    "nothing is returned": Benchmark(
        "result-unused",
        _TORCH
        + "@torch.compile(backend='aot_eager')\ndef f(q):\n    attend(q)\nf(q)\n"
        + _LOOP.format("f(q)", ""),
        _TORCH
        + "@torch.compile(backend='aot_eager')\ndef f(q):\n    return attend(q)\nf(q)\n"
        + _LOOP.format("f(q)", ""),
    ),
    "processor time": Benchmark(
        "processor-clock",
        _FIRST.replace("known", "seen")
        + "import time\nattend(q)\n"
        + _LAPS.format("attend(q)", "max").replace("perf_counter", "process_time"),
        _FIRST + "import time\nattend(q)\n" + _LAPS.format("attend(q)", "max"),
    ),
    "processor time in nanoseconds": Benchmark(
        "processor-clock",
        _SLEEP.format("process_time_ns"),
        _SLEEP.format("perf_counter_ns"),
    ),
    "time of one thread": Benchmark(
        "processor-clock",
        _SLEEP.format("thread_time"),
        _SLEEP.format("perf_counter"),
    ),
    "a search in the first call": Benchmark(
        "first-call-counted",
        "import time\n" + _FIRST + _LAPS.format("attend(q)", "mean"),
        "import time\nfrom statistics import median\n" + _FIRST + _LAPS.format("attend(q)", "median"),
    ),
    "a search in a loop": Benchmark(
        "first-call-counted",
        "import time\n" + _FIRST + _LOOP.format("attend(q)", ""),
        "import time\n" + _FIRST + "attend(q)\n" + _LOOP.format("attend(q)", ""),
    ),
    "a search within a timer": Benchmark(
        "first-call-counted",
        "import time\n" + _FIRST + _TIMER.format(""),
        "import time\n" + _FIRST + _TIMER.format("attend(q)"),
    ),
    "no clock": Benchmark(
        "no-timing",
        "import time\nprint(time.perf_counter())",
        "import time\nt = time.perf_counter()\nsum(range(9))  # here\nprint(time.perf_counter() - t)",
    ),
    "a script that fails": Benchmark(
        "subject",
        "import time\nt = time.time()\nprint(1 / 0)  # here",
        "import time\nt = time.time()\nx = 1 / 1  # here\nprint(time.time() - t)",
    ),
}
