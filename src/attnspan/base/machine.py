"""Facts of the machine and the process for reports. Paths are left out, because they may name the user."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_NAMES = ("ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "LD_PRELOAD", "NPROC", "XLA_FLAGS")
_PREFIXES = (
    *("ATTNSPAN_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "OV_CPU_"),
    *("PYTORCH_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_"),
)
_PATH = re.compile(r"[^\s=,:;]*[/\\](?:(?! --)[^=,:;])*")  # folder names may contain spaces
_RUNTIME = re.compile(r"/((?:libgomp|libomp|libiomp5)[^/\s]*)$", re.MULTILINE)


def cpu_model() -> str:
    """Name of the processor, from the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def settings() -> dict[str, str]:
    """Environment variables that are set and change speed or results. "(path)" replaces each path.

    Example:
        >>> os.environ["ATTNSPAN_EXAMPLE"] = "cache=/home/someone/cache,1"
        >>> settings()["ATTNSPAN_EXAMPLE"]
        'cache=(path),1'
        >>> del os.environ["ATTNSPAN_EXAMPLE"]
    """
    found = sorted(x for x in os.environ.items() if x[0] in _NAMES or x[0].startswith(_PREFIXES))
    return {name: _PATH.sub("(path)", value) for name, value in found}


def version_of(package: str) -> str | None:
    """Version of an installed package, or None if it is not installed.

    Example:
        >>> version_of("tensorfoo") is None
        True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def openmp_runtimes() -> list[str] | None:
    """File names of the OpenMP runtimes in this process, or None if the system does not list them.

    Two runtimes start two sets of threads, which compete for the cores.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return sorted(set(_RUNTIME.findall(maps)))
