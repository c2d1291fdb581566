"""The configurations that `attnspan tune` found on this machine, for backends to look up.

Reading never raises: a file that cannot be used is logged, and kernels make their own choice.
"""

import os
import re
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CONFIG_FIELDS",
    "Key",
    "cache_path",
    "device_name",
    "file_name",
    "header",
    "length_bucket",
    "load",
    "lookup",
    "lookup_in",
    "mask_kind",
    "read",
]

#: What a caller may choose for the CPU kernel, in the core's order. 0 is the kernel's own choice.
CONFIG_FIELDS = ("block_q", "block_k", "threads")

_SCHEMA = 2  # version of the file format
# What identifies a processor in /proc/cpuinfo. Virtual machines hide the name, hence the numbers.
_PROCESSOR = "model name|cpu family|model|stepping|CPU (?:implementer|part|variant|revision)"


@dataclass(frozen=True)
class Key:
    """The calls that share a configuration.

    Example:
        >>> str(Key("cpu", "forward", "avx2", "float32", 64, length_bucket(1000), "half"))
        'cpu forward avx2 float32 D=64 S<=1024 half'
    """

    backend: str
    direction: str  # "forward" or "backward"
    isa: str  # instruction-set level or architecture
    dtype: str
    head_dim: int
    length_bucket: int
    mask_kind: str

    def __str__(self) -> str:
        names = f"{self.backend} {self.direction} {self.isa} {self.dtype}"
        return f"{names} D={self.head_dim} S<={2**self.length_bucket} {self.mask_kind}"


def length_bucket(k_len: int) -> int:
    """ceil(log2(k_len)), as in the core; 0 for no keys."""
    return max(k_len - 1, 0).bit_length()


def mask_kind(q_len: int, k_len: int, pairs: float) -> str:
    """The kind of a mask with ``pairs`` visible pairs per head, as in the core.

    Example:
        >>> mask_kind(64, 64, 64 * 65 / 2), mask_kind(1, 4096, 4096), mask_kind(64, 64, 64)
        ('half', 'decode', 'sparse')
    """
    if q_len <= 16:
        return "decode"
    share = 4 * pairs / max(q_len * k_len, 1)
    return "dense" if share >= 3 else "half" if share >= 1 else "sparse"


def device_name(isa: str) -> str:
    """The machine, as far as the best configuration depends on it: processor, usable threads, ``isa``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(4096).partition("\n\n")[0]
    except OSError:
        first = ""
    processor = " ".join(re.findall(rf"(?m)^(?:{_PROCESSOR})\s*: (.+)$", first)) or os.uname().machine
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor}, {threads} threads, {isa}"


def cache_path(device: str) -> Path | None:
    """The file of a device in the folder ``ATTNSPAN_TUNE_CACHE``; None if that is "off".

    The default is ``$XDG_CACHE_HOME/attnspan``, else ``~/.cache/attnspan``; None without a home folder.
    """
    given, base = os.environ.get("ATTNSPAN_TUNE_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative folder.
    default = os.path.join(base if os.path.isabs(base) else "~/.cache", "attnspan")
    folder = os.path.expanduser(given or default)
    return None if given.lower() == "off" or folder[0] == "~" else Path(folder, file_name(device))


def file_name(device: str) -> str:
    """The name of a device's file."""
    return f"tuned-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def header(device: str) -> dict[str, Any]:
    """What a file must say of itself to be read."""
    return {"schema": _SCHEMA, "version": _version(), "device": device}


def _version() -> str:
    """Ours; that of the source tree where it runs without having been installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("attnspan")
    except PackageNotFoundError:
        import tomllib

        text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])


def read(path: Path, device: str) -> list[dict[str, Any]]:
    """The well-formed entries of a file, or [] if it is missing or of another format, version or device."""
    try:
        content = path.read_bytes()
        import json  # Most processes have no file to parse.

        value, expected = json.loads(content), header(device)
        got = {name: value.get(name) for name in expected}
        if got != expected:
            raise ValueError(f"expected {expected}, got {got}")
        return [entry for entry in value["entries"] if _well_formed(entry)]
    except FileNotFoundError:
        return []
    except Exception as error:  # Whatever a file holds, attention works without it.
        _log(f"{path}: {error}. Run `attnspan tune` to replace the file")
        return []


def _well_formed(entry: Any) -> bool:
    try:
        *names, head_dim, bucket, kind = astuple(Key(**entry["key"]))
        numbers = (head_dim, bucket, *entry["config"].values())
        legal = all(type(x) is int and 0 <= x < 2**31 for x in numbers) and bucket < 32
        return legal and {type(x) for x in (*names, kind)} == {str}
    except (AttributeError, KeyError, TypeError):
        return False


def lookup(backend: str, device: str) -> dict[Key, dict[str, int]]:
    """The configurations of a backend on a device that differ from the kernel's own choice."""
    path = cache_path(device)
    found = lookup_in(read(path, device) if path else [])
    return {key: config for key, config in found.items() if key.backend == backend}


def lookup_in(entries: list[dict[str, Any]]) -> dict[Key, dict[str, int]]:
    """The configurations of a file's entries that differ from a kernel's own choice."""
    return {Key(**entry["key"]): entry["config"] for entry in entries if any(entry["config"].values())}


def load(core: Any) -> None:
    """Hand the configurations of this machine to the compiled module."""
    try:
        found = lookup("cpu", device_name(core.active_isa()))
        choices = [[config.get(name, 0) for name in CONFIG_FIELDS] for config in found.values()]
        core.set_tuned([(*astuple(key)[1:], *choice) for key, choice in zip(found, choices, strict=True)])
    except ValueError as error:  # an illegal ATTNSPAN_ISA or a name that the core does not know
        _log(f"configurations of the CPU kernel: {error}")


def _log(problem: str) -> None:
    import logging

    logging.getLogger("attnspan").warning(f"{problem.removesuffix('.')}. Kernels make their own choice.")
