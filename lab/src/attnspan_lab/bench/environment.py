"""The machine, versions and settings of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnspan.base.machine import cpu_model, settings, version_of

__all__ = ["caches", "describe_environment", "same_machine"]

_OTHERS = ("tokamax", "flash-attn", "triton", "transformers", "openvino", "onnxruntime")
_PACKAGES = ("attnspan", "torch", "numpy", "jax", "jaxlib", *_OTHERS)
_SYSTEM = Path("/sys/devices/system/cpu")
# Keys that identify a machine. The rest of the environment may change on one machine.
_IDENTITY = ("cpu", "cores", "gpu", "isa", "threads")


def describe_environment(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine and versions, so that a reader can judge and repeat the measurement.

    Unknown values are None.
    """
    import torch

    from attnspan.kernels import cpu

    built = cpu.core is not None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "revision": _revision(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "isa": cpu.isa() if built else None,
        "threading": cpu.threading() if built else None,
        "aten_capability": torch.backends.cpu.get_cpu_capability(),
        "caches": caches(),
        "governor": _first_line(_SYSTEM / "cpu0/cpufreq/scaling_governor"),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "memory_bytes": _memory_bytes(),
        "gpu": _gpu() if device == "cuda" else None,
        "variables": settings(),
    }


def same_machine(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the differences of two machines. The list is empty for the same machine.

    Example:
        >>> same_machine({"cpu": "a", "threads": 2}, {"cpu": "b", "threads": 2})
        ['cpu: a, then b']
    """
    return [
        f"{name}: {old.get(name)}, then {new.get(name)}"
        for name in _IDENTITY
        if old.get(name) != new.get(name)
    ]


def _revision() -> str | None:
    """Return the commit of the source tree that the package runs from, with a mark for local changes."""
    folder = Path(__file__).parent
    found = _git(folder, "rev-parse", "HEAD")
    # An installed package may lie inside another project's repository, in its environment.
    if not found or not _git(folder, "ls-files", "--error-unmatch", Path(__file__).name):
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{found[:12]}{' with changes' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def caches() -> dict[str, str]:
    """Read the first core's cache sizes by level, such as {"L1 Data": "48K"}."""
    found = {}
    for folder in sorted((_SYSTEM / "cpu0/cache").glob("index*")):
        level, kind, size = (_first_line(folder / name) for name in ("level", "type", "size"))
        if level and size:
            found[f"L{level} {kind}"] = size
    return found


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf") or sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
