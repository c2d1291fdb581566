"""What `attnspan tune` found on this machine, read once and handed to the compiled module.

The file is a convenience: whatever is wrong with it, importing and calling go on with the kernel's own
choices, and one `TuningCacheWarning` says why. Only what a start without a file needs is imported at the top.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = [
    "CONFIG_FIELDS",
    "SCHEMA",
    "Key",
    "Loaded",
    "TuningCacheWarning",
    "cache_path",
    "device_name",
    "in_use",
    "installed_version",
    "length_bucket",
    "load",
    "load_once",
    "mask_kind",
    "parse_cache",
    "rows",
]

#: Version of the file's form. A file with another one is ignored, and replaced by the next `attnspan tune`.
SCHEMA = 1

#: What the CPU kernel lets a caller choose, in the order of the compiled module. 0 is its own choice.
CONFIG_FIELDS = ("block_q", "block_k", "threads")

_VARIABLE = "ATTNSPAN_TUNE_CACHE"
_REMEDY = f"Run `attnspan tune` to replace it, or set {_VARIABLE}=off"


class TuningCacheWarning(UserWarning):
    """The file of tuned configurations is not used, and why.

    Where warnings are errors it is a line on stderr instead: a bad cache file must not break an import.

    Example:
        >>> issubclass(TuningCacheWarning, UserWarning)
        True
    """


@dataclass(frozen=True)
class Key:
    """The calls that share a configuration.

    Attributes:
        backend: Name of the backend, such as ``"cpu"``.
        direction: ``"forward"`` or ``"backward"``.
        isa: Instruction-set level or architecture, such as ``"avx2"``.
        dtype: Name of the element type of q, k and v.
        head_dim: Elements of one query.
        length_bucket: See `length_bucket`.
        mask_kind: See `mask_kind`.

    Example:
        >>> str(Key("cpu", "forward", "avx2", "float32", 64, length_bucket(1000), "half"))
        'cpu forward avx2 float32 D=64 S<=1024 half'
    """

    backend: str
    direction: str
    isa: str
    dtype: str
    head_dim: int
    length_bucket: int
    mask_kind: str

    def __str__(self) -> str:
        return (
            f"{self.backend} {self.direction} {self.isa} {self.dtype} D={self.head_dim} "
            f"S<={2**self.length_bucket} {self.mask_kind}"
        )

    @classmethod
    def from_json(cls, value: Any) -> "Key":
        """Read a JSON object with the fields of a key.

        Raises:
            ValueError: It is something else.

        Example:
            >>> Key.from_json({"backend": "cpu"})
            Traceback (most recent call last):
            ValueError: a key: expected backend, direction, isa, dtype, head_dim, length_bucket, mask_kind, \
got {'backend': 'cpu'}
        """
        types = {each.name: each.type for each in fields(cls)}
        if not isinstance(value, dict) or {name: type(x) for name, x in value.items()} != types:
            raise ValueError(f"a key: expected {', '.join(types)}, got {_short(value)}")
        if not (0 <= value["length_bucket"] < 32 and 0 < value["head_dim"] < 2**31):
            raise ValueError(f"a key: expected head_dim > 0 and length_bucket < 32, got {_short(value)}")
        return cls(**value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def length_bucket(k_len: int) -> int:
    """ceil(log2(k_len)): calls with up to twice as many keys share a configuration.

    Example:
        >>> [length_bucket(n) for n in (0, 1, 2, 3, 1024, 1025)]
        [0, 0, 1, 2, 10, 11]
    """
    return max(k_len - 1, 0).bit_length()


def mask_kind(q_len: int, k_len: int, pairs: float) -> str:
    """How much of its rectangle a mask shows: "dense" from 3/4, "half" from 1/4, else "sparse"; or "decode".

    Args:
        q_len: Query rows; up to 16 of them are "decode", whatever the mask.
        k_len: Keys.
        pairs: Visible pairs of one head, the mean over the distinct slices of the mask.

    Example:
        >>> mask_kind(64, 64, 64 * 65 / 2), mask_kind(1, 4096, 4096), mask_kind(64, 64, 64)
        ('half', 'decode', 'sparse')
    """
    if q_len <= 16:
        return "decode"
    if 4 * pairs >= 3 * q_len * k_len:
        return "dense"
    return "half" if 4 * pairs >= q_len * k_len else "sparse"


def device_name(isa: str) -> str:
    """The machine as far as the best configuration depends on it: processor, threads, instruction set.

    Args:
        isa: The level in use.

    Example:
        >>> device_name("avx2").endswith("avx2")
        True
    """
    return f"{_processor()}, {_usable_threads()} threads, {isa}"


def _processor() -> str:
    """The processor's name; with its numbers where there are some, as virtual machines hide the name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(4096).partition("\n\n")[0]
    except OSError:
        import platform

        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^([^\t:]+?)\s*: (.+)$", first, re.MULTILINE))
    if "model name" in found and "model" in found:
        numbers = (found.get("cpu family", "?"), found["model"], found.get("stepping", "?"))
        return f"{found['model name']} {'-'.join(numbers)}"
    named = ("model name", "CPU implementer", "CPU part", "CPU variant", "CPU revision")
    return " ".join(found[name] for name in named if name in found) or os.uname().machine


def _usable_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_path(device: str) -> Path | None:
    """Where the configurations of a device are kept.

    Args:
        device: Of `device_name`.

    Returns:
        ``tuned-<device>.json`` in the folder that ``ATTNSPAN_TUNE_CACHE`` names, or the file that it names;
        without it in ``$XDG_CACHE_HOME/attnspan`` or ``~/.cache/attnspan``. None where the variable is "off"
        or there is no home folder.

    Example:
        >>> path = cache_path("Some CPU, 2 threads, avx2")
        >>> path is None or path.suffix == ".json"
        True
    """
    name = f"tuned-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    given = os.environ.get(_VARIABLE, "")
    if given.lower() == "off":
        return None
    if given:
        path = Path(os.path.expanduser(given))
        return path / name if path.is_dir() or given.endswith(("/", os.sep)) else path
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # a relative one is to be ignored, says the XDG specification
        base = os.path.expanduser("~/.cache")
    return Path(base, "attnspan", name) if os.path.isabs(base) else None


def parse_cache(content: bytes, device: str) -> list[dict[str, Any]]:
    """The entries of a file, each with "key", "config", "version", and whatever else was stored beside them.

    Args:
        content: The file's bytes.
        device: Whose file it should be.

    Raises:
        ValueError: It is damaged, of another schema, or of another device.

    Example:
        >>> parse_cache(b'{"schema": 1, "device": "a", "entries": []}', "a")
        []
        >>> parse_cache(b'{"schema": 0}', "a")
        Traceback (most recent call last):
        ValueError: expected schema 1, got 0
    """
    import json

    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, got what does not parse ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {_short(value)}")
    if type(value.get("schema")) is not int or value["schema"] != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {_short(value.get('schema'))}")
    if value.get("device") != device:
        raise ValueError(f"expected configurations of {device!r}, got those of {_short(value.get('device'))}")
    if not isinstance(value.get("entries"), list):
        raise ValueError(f"expected a list of entries, got {_short(value.get('entries'))}")
    for entry in value["entries"]:
        _check_entry(entry)
    return value["entries"]  # type: ignore[no-any-return]


def _check_entry(entry: Any) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("version"), str):
        raise ValueError(f"an entry: expected an object with a version, got {_short(entry)}")
    Key.from_json(entry.get("key"))
    config = entry.get("config")
    if not isinstance(config, dict) or not all(type(x) is int and 0 <= x < 2**31 for x in config.values()):
        raise ValueError(f"an entry's config: expected whole numbers from 0 on, got {_short(config)}")


def rows(entries: Iterable[Mapping[str, Any]], version: str) -> list[tuple[Any, ...]]:
    """The table that the compiled module takes: what differs from its own choice, found by this version.

    Args:
        entries: Of `parse_cache`, of any back end.
        version: The attnspan that runs.

    Returns:
        Tuples (direction, isa, dtype, head_dim, length_bucket, mask_kind, block_q, block_k, threads).

    Raises:
        ValueError: A configuration has a field that the CPU kernel does not know.

    Example:
        >>> key = Key("cpu", "forward", "avx2", "float32", 64, 10, "half")
        >>> rows([{"key": vars(key), "config": {"block_q": 96}, "version": "1"}], "1")
        [('forward', 'avx2', 'float32', 64, 10, 'half', 96, 0, 0)]
    """
    found = []
    for entry in entries:
        key, config = entry["key"], entry["config"]
        if key["backend"] != "cpu" or entry["version"] != version or not any(config.values()):
            continue
        if not set(config) <= set(CONFIG_FIELDS):
            raise ValueError(f"an entry's config: expected {', '.join(CONFIG_FIELDS)}, got {_short(config)}")
        place = (
            key[name] for name in ("direction", "isa", "dtype", "head_dim", "length_bucket", "mask_kind")
        )
        found.append((*place, *(config.get(name, 0) for name in CONFIG_FIELDS)))
    return found


@dataclass(frozen=True)
class Loaded:
    """What the compiled module was given.

    Attributes:
        path: The file that was looked for; None where there is none to look for.
        configurations: How many keys do not take the kernel's own choice.
        problem: Why the file, or a part of it, is not used; empty where all is well.

    Example:
        >>> Loaded(None, 0, "").configurations
        0
    """

    path: Path | None
    configurations: int
    problem: str


_loaded: Loaded | None = None


def in_use() -> Loaded | None:
    """What `load_once` loaded, for a record of the environment; None before it.

    Example:
        >>> isinstance(in_use(), Loaded | None)
        True
    """
    return _loaded


def load_once(core: Any) -> None:
    """Hand the tuned configurations of this machine to the compiled module; later calls do nothing.

    Never raises for what is wrong with the file: one `TuningCacheWarning` names it.

    Args:
        core: The compiled module.

    Example:
        >>> from attnspan.kernels import cpu
        >>> load_once(cpu._core)
        >>> in_use() is not None
        True
    """
    global _loaded
    if _loaded is not None:
        return
    _loaded = load(core)
    if not _loaded.problem:
        return
    message = f"{_loaded.path}: {_loaded.problem}. Kernels take their own choice. {_REMEDY}."
    try:
        warnings.warn(message, TuningCacheWarning, stacklevel=2)
    except TuningCacheWarning:
        print(f"TuningCacheWarning: {message}", file=sys.stderr)


def load(core: Any) -> Loaded:
    """As `load_once`, each time, without the warning.

    Args:
        core: The compiled module.

    Example:
        >>> class Core:
        ...     def active_isa(self):
        ...         return "a level that no machine has"
        >>> load(Core()).configurations
        0
    """
    try:
        device = device_name(core.active_isa())
    except ValueError:  # An illegal ATTNSPAN_ISA is reported by the first call, which cannot run.
        return Loaded(None, 0, "")
    path = cache_path(device)
    if path is None:
        return Loaded(None, 0, "")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Loaded(path, 0, "")
    except OSError as error:
        return Loaded(path, 0, f"expected a readable file, got {error.strerror}")
    try:
        entries, version = parse_cache(content, device), installed_version()
        table = rows(entries, version)
        core.set_tuned(table)
    except (ValueError, TypeError, OverflowError) as error:
        return Loaded(path, 0, str(error).removesuffix("."))
    problem = ""
    if entries and not any(entry["version"] == version for entry in entries):
        others = ", ".join(sorted({entry["version"] for entry in entries}))
        problem = f"expected entries of attnspan {version}, got those of {others}"
    return Loaded(path, len(table), problem)


def installed_version() -> str:
    """The version of attnspan that runs, as entries record it; "unknown" from bare sources.

    Example:
        >>> installed_version() != ""
        True
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("attnspan")
    except PackageNotFoundError:  # run from its sources
        return "unknown"
