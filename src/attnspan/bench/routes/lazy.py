"""The route through lazy PyTorch/XLA: in a process of its own, because it has an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import attnspan
from attnspan.bench._plain import from_plain, to_plain
from attnspan.bench.cells import Workload
from attnspan.bench.routes.findings import Route
from attnspan.bench.routes.rounds import Settings
from attnspan.errors import OptionError

__all__ = ["LAZY", "LAZY_PARTNER", "find_python", "lazy_routes"]

#: Names of the route, and of the one it is timed in turn with: JAX in the same process.
LAZY, LAZY_PARTNER = "torch-xla", "jax-beside-xla"
WHAT = "attnspan.xla.attention, lazy PyTorch/XLA"

_ENVIRONMENT = Path(".venv-xla") / "bin" / "python"
_ROOT = Path(attnspan.__file__).parents[2]
_ABSENT = (
    "torch_xla is not installed here, and there is no environment .venv-xla: `make test-xla` makes one, "
    "or name another's Python by --xla-python (docs/xla.md)"
)


def find_python(given: Path | None = None) -> Path | None:
    """The interpreter of an environment with PyTorch/XLA, or None.

    Args:
        given: Taken as it is.

    Returns:
        The given one, this one where torch_xla is installed in it, or that of .venv-xla below the working
        directory or the source tree.

    Raises:
        OptionError: The given one is no file.

    Example:
        >>> find_python(Path("nowhere/python"))
        Traceback (most recent call last):
        attnspan.errors.OptionError: --xla-python: expected the Python of an environment with torch_xla, got \
nowhere/python, which is no file. Check the path.
    """
    if given is not None:
        if not given.is_file():
            raise OptionError(
                "--xla-python",
                expected="the Python of an environment with torch_xla",
                got=f"{given}, which is no file",
                remedy="Check the path",
            )
        return given
    if find_spec("torch_xla") is not None:
        return Path(sys.executable)
    found = (folder / _ENVIRONMENT for folder in (Path.cwd(), _ROOT))
    return next((python for python in found if python.is_file()), None)


def lazy_routes(
    workload: Workload,
    mode: str,
    settings: Settings,
    *,
    threads: int,
    python: Path | None,
    timeout: float = 900.0,
) -> tuple[Route, ...]:
    """The lazy route and its partner, or the lazy route with the reason why it is absent.

    Args:
        workload: What to compute.
        mode: "forward" or "forward+backward".
        settings: The budget and the cold calls count; the clocks are the process's own.
        threads: CPU threads of that process.
        python: From `find_python`.
        timeout: Seconds after which the process is ended.

    Returns:
        One route with a reason, or the partner and the lazy one, whose ratio is against the partner.

    Example:
        >>> work = Workload("two", "report", 1, 2, 2, 32, 32, 8, 8, "float32", "full")
        >>> (route,) = lazy_routes(work, "forward", Settings(), threads=1, python=None)
        >>> route.reason[:36]
        'torch_xla is not installed here, and'
    """
    if python is None:
        return (Route(LAZY, WHAT, reason=_ABSENT),)
    task = {
        "workload": to_plain(workload),
        "mode": mode,
        "budget": to_plain(settings.budget),
        "cold_calls": settings.cold_calls,
    }
    try:
        done = subprocess.run(
            [str(python), "-m", "attnspan.bench.routes.lazy_worker"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=_environment(threads),
        )
    except subprocess.TimeoutExpired:
        return (Route(LAZY, WHAT, reason=f"its process had not ended after {timeout:.0f} s"),)
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return (Route(LAZY, WHAT, reason=f"its process failed: {last[:200]}"),)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    routes = tuple(from_plain(Route, item, "the process of PyTorch/XLA") for item in found)
    return tuple(replace(route, partner=LAZY_PARTNER) if route.ratio else route for route in routes)


def _environment(threads: int) -> dict[str, str]:
    """Variables of the other process: the CPU device, as many threads, and this source tree."""
    source = Path(attnspan.__file__).parents[1]
    paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    # An installed package's folder holds this environment's torch too, which must not shadow the other's.
    paths += [] if (source / "torch").is_dir() else [str(source)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "NPROC": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU"),
    }
