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


def pair(kind: str, source: str, sick: str, healthy: str) -> Benchmark:
    """Make both sources from one, in which <> stands for the part that differs."""
    return Benchmark(kind, source.replace("<>", sick), source.replace("<>", healthy))


def loop(call: str, wait: str = "") -> str:
    return f"""
start = time.perf_counter()
for _ in range(10):  # here
    {call}
{wait}
print((time.perf_counter() - start) / 10)
"""


def laps(call: str, statistic: str = "median") -> str:
    return f"""
laps = []
for _ in range(9):
    start = time.perf_counter()
    {call}  # here
    laps.append(time.perf_counter() - start)
print(f"{{{statistic}(laps):.9f}} s")
"""


_JAX = """
import jax, jax.numpy as jnp, time
import numpy as np
from statistics import median
@jax.jit
def attend(q):
    return jax.nn.softmax(q @ q.T) @ q
q = jnp.ones((1000, 64))
mean = lambda x: sum(x) / len(x)
"""
_CAPTURED = _JAX + "n = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)\n"
_TORCH = """
import time, timeit, torch
from statistics import median
import torch.nn.functional as F
def attend(q):
    return F.scaled_dot_product_attention(q, q, q)
q = torch.ones(1, 2, 64, 16)
"""
_COMPILED = _TORCH + "f = torch.compile(attend, backend='aot_eager')\n"
_WARM = "jax.block_until_ready(attend(q))\n"
_BLOCK = "jax.block_until_ready(out)"
# The first call takes long, as a search for the fastest kernel does.
_FIRST = """
import time
from statistics import median
known = {}
def attend(q):
    if q not in known:
        time.sleep(0.2)
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
from time import sleep, <> as clock
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
<>
with Timer() as timer:
    attend(q)  # here
print(timer.took)
"""


def result(made: str) -> str:
    """Time a jitted function of q."""
    return _JAX + f"f = jax.jit(lambda q: {made})\nf(q)\n" + loop("out = f(q)", _BLOCK)


BENCHMARKS = {
    "compilation in a loop": pair(
        "compile-counted", _JAX + "<>" + loop("out = attend(q)", _BLOCK), "", _WARM
    ),
    "a mean with the first sample": pair(
        "compile-counted", _JAX + laps("attend(q).block_until_ready()", "<>"), "mean", "median"
    ),
    "a new function in each call": pair(
        "compile-counted",
        _JAX + "f = jax.jit(lambda q: q @ q.T + 1)\nf(q)\n" + loop("out = <>(q)", _BLOCK),
        "jax.jit(lambda q: q @ q.T + 1)",
        "f",
    ),
    "timeit compiles": pair(
        "compile-counted", _COMPILED + "<>print(timeit.timeit(lambda: f(q), number=5))  # here", "", "f(q)\n"
    ),
    "results are dropped": pair("not-waited", _JAX + _WARM + loop("attend(q)<>"), "", ".block_until_ready()"),
    "the last result is not waited for": pair(
        "not-waited", _JAX + _WARM + loop("out = attend(q)", "<>"), "", _BLOCK
    ),
    "samples without a wait": pair(
        "not-waited", _JAX + _WARM + laps("attend(q)<>"), "", ".block_until_ready()"
    ),
    "a wait for each call": Benchmark(
        "waited-each-call",
        _FAR + loop("Far().block_until_ready()"),
        _FAR + loop("out = Far()", "out.block_until_ready()"),
    ),
    "random inputs": pair(
        "inputs-counted",
        _TORCH + "attend(q)\nx = torch.randn(3000, 1000)\n" + loop("attend(<>[None, None, :64, :16])"),
        "torch.randn(3000, 1000)",
        "x",
    ),
    "a transfer": pair(
        "inputs-counted",
        _JAX
        + "n = np.ones((3000, 1000))\nx = jnp.asarray(n)\n"
        + laps("jax.block_until_ready(<>[:8, :8] + 1)"),
        "jnp.asarray(n)",
        "x",
    ),
    "inputs in a function": Benchmark(
        "inputs-counted",
        _TORCH + _FUNCTION.format("", "x = torch.rand(3000, 1000)  # here\n    y = attend(q)"),
        _TORCH + _FUNCTION.format("x = torch.rand(3000, 1000)", "y = attend(q)"),
    ),
    "a part of the results": pair("result-unused", result("(q @ q.T @ q, q + 1)<>"), "[1]", ""),
    "a loop in the compiled function": pair(
        "result-unused", result("[attend(q + i) for i in range(4)]<>"), "[-1]", ""
    ),
    "arrays that the function captures": Benchmark(
        "result-constant",
        _CAPTURED + "f = jax.jit(lambda: attend(n))\nf()\n" + loop("out = f()", _BLOCK),
        _CAPTURED + "attend(n)\n" + loop("out = attend(n)", _BLOCK),
    ),
    "nothing is returned": pair(
        "result-unused",
        _TORCH + "@torch.compile(backend='aot_eager')\ndef f(q):\n    <>attend(q)\nf(q)\n" + loop("f(q)"),
        "",
        "return ",
    ),
    "processor time": pair(
        "processor-clock",
        _FIRST + "attend(q)\n" + laps("attend(q)", "max").replace("perf_counter", "<>"),
        "process_time",
        "perf_counter",
    ),
    "processor time in nanoseconds": pair("processor-clock", _SLEEP, "process_time_ns", "perf_counter_ns"),
    "time of one thread": pair("processor-clock", _SLEEP, "thread_time", "perf_counter"),
    "a search in the first call": pair(
        "first-call-counted", _FIRST + laps("attend(q)", "<>"), "mean", "median"
    ),
    "a search in a loop": pair("first-call-counted", _FIRST + "<>" + loop("attend(q)"), "", "attend(q)\n"),
    "a search within a timer": pair("first-call-counted", _FIRST + _TIMER, "", "attend(q)"),
    "no clock": Benchmark(
        "no-timing",
        "import time\nprint(time.perf_counter())",
        "import time\nt = time.perf_counter()\nsum(range(9))  # here\nprint(time.perf_counter() - t)",
    ),
    "a script that fails": pair(
        "subject", "import time\nt = time.time()\nx = 1 / <>  # here\nprint(time.time() - t)", "0", "1"
    ),
}
