"""File cache of searches, so that later processes on this machine do not search again."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from attnspan.base.machine import version_of
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.files import write_json
from attnspan_lab.tune.search import Found, search

__all__ = ["cache_path", "entries", "tuned"]

C = TypeVar("C", bound=Hashable)

_SCHEMA = 3  # version of the file format
_MOST_OTHERS = 0.2  # processors. Next to busy processes, configurations with fewer threads look too fast.
_PACKAGES = ("attnspan", "torch", "jax", "triton")


def tuned(
    name: str,
    make_call: Callable[[C], Callable[[], Any]],
    configs: Sequence[C],
    default: C,
    *,
    seconds: float = 5.0,
    packages: Sequence[str] = _PACKAGES,
    path: Path | None = None,
    **more: Any,
) -> Found[C]:
    """Return the fastest configuration on this machine, from the cache or from a search.

    An entry is valid for one name, machine and set of versions. Its configuration must still be a candidate.

    Args:
        name: Name of the tuned call. It must contain everything that affects the best configuration: shapes,
            dtype, direction.
        make_call, configs, default, seconds: Arguments of `attnspan_lab.tune.search.search`.
        packages: Packages whose versions matter.
        path: The cache file. Default: `cache_path()`. If that is None, nothing is stored.
        more: Other arguments of `search`.

    Raises:
        OptionError: The file cannot be written.
        Exception: The call with the default configuration raised it.

    Example:
        >>> import tempfile, time
        >>> path = Path(tempfile.mkdtemp()) / "tuned.json"
        >>> found = tuned("sleep", lambda x: lambda: time.sleep(x / 1e3), [1, 5], 10, seconds=0.5, path=path)
        >>> found.tried, found.contender
        (2, 1)
    """
    path = path or cache_path()
    key = {"name": name, "machine": _machine(), "versions": {x: version_of(x) for x in packages}}
    known: dict[str, Any] = next((x["found"] for x in entries(path) if x["key"] == key), {})
    for config in (default, *configs) if known else ():
        if str(config) == known["config"]:
            return Found(config, f"remembered: {known['reason']}", 0, ())
    start, before = time.monotonic(), _other_seconds()
    found = search(make_call, configs, default, seconds=seconds, **more)
    others = (_other_seconds() - before) / max(time.monotonic() - start, 1e-9)
    if others > _MOST_OTHERS and found.config != default:
        reason = f"the default, because other processes kept {others:.1f} processors busy"
        return replace(found, config=default, reason=reason)
    if path is not None:
        kept = [x for x in entries(path) if x["key"] != key]
        date = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"key": key, "found": _plain(found), "date": date}
        remedy = "Set ATTNSPAN_TUNE_CACHE to another folder"
        write_json(path, {"schema": _SCHEMA, "entries": [*kept, entry]}, remedy=remedy)
    return found


def _plain(found: Found[Any]) -> dict[str, Any]:
    """Convert a result to plain data. Configurations become text, which candidates are compared with."""
    shown = {"config": str(found.config), "contender": str(found.contender)}
    return vars(found) | shown | {"failures": [[str(x), why] for x, why in found.failures]}


def cache_path() -> Path | None:
    """Return the cache file in the folder ``ATTNSPAN_TUNE_CACHE``, or None if the variable is "off".

    The default folder is ``$XDG_CACHE_HOME/attnspan``, or else ``~/.cache/attnspan``. Without a home folder,
    the result is None.
    """
    given, base = os.environ.get("ATTNSPAN_TUNE_CACHE", ""), os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative folder.
    default = os.path.join(base if os.path.isabs(base) else "~/.cache", "attnspan")
    folder = os.path.expanduser(given or default)
    return None if given.lower() == "off" or folder[0] == "~" else Path(folder, "tuned.json")


def entries(path: Path | None) -> list[dict[str, Any]]:
    """Read the well-formed entries of a file. An unusable file gives one warning in the log."""
    if path is None or not path.exists():
        return []
    try:
        value = json.loads(path.read_bytes())
        if value["schema"] != _SCHEMA:
            raise ValueError(f"expected schema {_SCHEMA}, got {value['schema']}")
        return [x for x in value["entries"] if {"config", "reason"} <= set(x["found"]) and x["key"]["name"]]
    except Exception as error:  # The next search replaces an unusable file.
        logging.getLogger("attnspan").warning(f"{path}: {error}. The next search replaces the file.")
        return []


def _machine() -> str:
    """Describe the machine, as far as it affects the best configuration: CPU, cores, threads, GPU."""
    found = describe_environment()
    names = ("cpu", "isa", "usable_cores", "threads", "gpu")
    return ", ".join(f"{x} {found[x]}" for x in names if found.get(x))


def _other_seconds() -> float:
    """Return the processor time of other processes. It is constant on systems without /proc/stat."""
    try:
        user, nice, system, _idle, _wait, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - time.process_time()
