"""One kernel by every route from Python, cold and warm: python benchmarks/routes.py [LENGTH] [--backward]

A report of 2025 measured one flash kernel at (1, 5, 16384, 128): 2.5 ms from JAX, 2.6 ms with call_jax and
3.0 ms from PyTorch/XLA. Its benchmark counted tracing as execution and synchronized after every call. Here
each route is

1. called at length 16, to measure the overhead of a call;
2. opened again, so that nothing is traced or compiled, and called ten times with synchronization after
   each call, as in a naive benchmark;
3. compared with the first route's result, in the norm;
4. timed warm, in turn with the first route: with synchronization after each call, and once after many calls.

PyTorch/XLA runs in its own process, with the Python of an environment that has it (`make test-xla` creates
.venv-xla), in turn with JAX. Samples go to --json FILE. If a route cannot run, the benchmark prints the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _routes import BOUNDS, COLD, TINY, Opened, Problem, Route, take
from _routes_ways import ROUTES, new_function, through_jax, through_torch

from attnspan.errors import OptionError
from attnspan_lab.bench.timing import Budget, Meter
from attnspan_lab.files import from_plain, to_plain, write_json

ENVIRONMENT = Path(__file__).parents[1] / ".venv-xla" / "bin" / "python"

# PyTorch/XLA. Its torch may be too old for attnspan.torch.

LAZY, PARTNER = "torch-xla", "jax-beside-xla"


class _LazyDevice:
    """PyTorch/XLA's queue: a call traces, submits its graph, and returns."""

    name = "xla"
    is_asynchronous = True
    is_ordered = True

    def synchronize(self, result: Any) -> None:
        import torch_xla.core.xla_model as xm

        del result
        xm.wait_device_ops()

    def is_idle(self, result: Any) -> bool:
        del result
        return True  # The queue has no query, but was synchronized just before.

    def timer(self) -> None:
        return None


def _lazy(problem: Problem) -> Opened:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    from attnspan.xla import attention

    def compiler() -> float:
        found = metrics.metric_data("CompileTime")  # number, total in ns, samples; None before the first
        return float(found[1]) / 1e9 if found else 0.0

    retraces: list[float] = []
    opened = through_torch(
        problem, attention, torch_xla.device(), device=_LazyDevice(), compiler=compiler, retraces=retraces
    )

    def call() -> Any:
        start = time.perf_counter()
        found = opened.call()
        retraces.append(time.perf_counter() - start)
        torch_xla.sync(wait=False)
        return found

    return replace(opened, call=call)


def _beside(problem: Problem) -> Opened:
    import jax

    return through_jax(jax, problem, new_function("xla"))


def worker(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the routes in the PyTorch/XLA environment, as plain data."""
    problem, budget = Problem(**task["problem"]), Budget(**task["budget"])
    routes = {PARTNER: _beside, LAZY: _lazy}
    found = take(routes, problem, replace(problem, length=TINY), BOUNDS[problem.dtype], budget, Meter())
    found[1].partner = PARTNER
    return [to_plain(x) for x in found]


def lazy_routes(
    problem: Problem, budget: Budget, python: Path | None, threads: int, timeout: float = 900
) -> list[Route]:
    """Measure lazy PyTorch/XLA and JAX in a process of that environment, or return a reason."""
    if problem.device != "cpu" or python is None or not python.is_file():
        return [
            Route(
                LAZY, "no environment with torch_xla: run `make test-xla` to create one, or pass --xla-python"
            )
        ]
    source = Path(__file__).parents[1] / "src"
    paths = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    count = str(threads)
    environment = {"PYTHONPATH": paths, "NPROC": count, "OMP_NUM_THREADS": count, "PJRT_DEVICE": "CPU"}
    task = json.dumps({"problem": asdict(problem), "budget": asdict(budget)})
    command = [str(python), __file__, "--worker"]
    try:
        done = subprocess.run(
            command,
            input=task,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        return [Route(LAZY, f"its process did not end within {timeout:.0f} s")]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or f"exit code {error.returncode}").splitlines()[-1]
        return [Route(LAZY, f"its process failed: {last[:200]}")]
    return [
        from_plain(Route, x, "the process of PyTorch/XLA") for x in json.loads(done.stdout.splitlines()[-1])
    ]


# The program.


def show(problem: Problem, found: Sequence[Route]) -> None:
    """Print the warm and cold measurements."""
    from attnspan_lab.console import Column, print_table, seconds_text, stdout

    warm: list[list[str]] = []
    cold: list[list[str]] = []
    for x in found:
        if x.execute is None or x.overhead is None:
            continue
        ratio, interval = "", ""
        if x.ratio is not None:
            ratio, interval = f"{x.ratio.median:.2f}", f"{x.ratio.low:.2f}-{x.ratio.high:.2f}"
        row = [seconds_text(x.pipelined.median if x.pipelined else None), seconds_text(x.execute.median)]
        name = f"{x.name}, to {x.partner}" if x.partner else x.name
        warm.append([name, *row, ratio, interval, seconds_text(x.overhead.median)])
        cold.append([x.name, *map(seconds_text, (x.hasty, x.cold[0], x.trace, x.compile))])
    console, route = stdout(), Column("route", words=True)
    console.print(f"{problem}\n")
    columns = [
        *map(Column, ("in a row", "each waited", "ratio")),
        Column("interval", drop=1),
        Column("tiny call"),
    ]
    print_table(
        console, "warm calls; ratio: over the first route, or over the named one", [route, *columns], warm
    )
    columns = [Column(name) for name in ("reports", "first call", "trace", "compile")]
    print_table(
        console, f"naive loop: {COLD} cold calls, with synchronization after each", [route, *columns], cold
    )
    for x in found:
        if x.reason is not None:
            console.print(f"not {x.name}: {x.reason}", style="dim")
        elif x.retrace is not None:
            console.print(f"{x.name} traces in every call: {seconds_text(x.retrace.median)} of Python")


def main(arguments: Sequence[str] | None = None) -> list[Route]:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "length", type=int, nargs="?", default=512, help="number of queries and keys; the report had 16384"
    )
    parser.add_argument("--dtype", default="float32", choices=BOUNDS)
    parser.add_argument("--backward", action="store_true", help="measure gradients as well")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each route")
    parser.add_argument(
        "--xla-python", type=Path, default=ENVIRONMENT, help="Python of an environment with torch_xla"
    )
    parser.add_argument("--json", type=Path, help="write measurements and samples to this file")
    given = parser.parse_args(arguments)
    if given.length < 1:
        parser.error(f"length: expected 1 or more, got {given.length}")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json: expected a file in a folder that exists, got {given.json}. Make the folder")
    try:
        budget = Budget(given.seconds, calls=10 if given.length < 4096 else 2)
    except OptionError as error:
        parser.error(str(error))
    import torch

    problem = Problem(given.length, given.dtype, given.backward, given.device)
    threads = torch.get_num_threads()
    tiny, meter = replace(problem, length=TINY), Meter(threads=threads)
    found = take(ROUTES, problem, tiny, BOUNDS[problem.dtype], budget, meter)
    found += lazy_routes(problem, budget, given.xla_python, threads)
    show(problem, found)
    if given.json:
        write_json(given.json, {"problem": problem, "routes": found})
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        print(json.dumps(worker(json.load(sys.stdin))))
    else:
        main()
