"""The writing side of the file that `attnspan.kernels.tuned` reads.

Any number of processes may write: each takes the lock, reads what is there, adds its own, and puts the new
file into place by a rename, so that a reader sees the old file or the new one and nobody's find is lost.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attnspan.bench._plain import to_plain
from attnspan.errors import OptionError
from attnspan.kernels.tuned import SCHEMA, parse_cache
from attnspan.tune.entry import Entry

try:
    import fcntl
except ImportError:  # not on Windows; there the lock is a file that exists while it is held
    fcntl = None  # type: ignore[assignment]

__all__ = ["clear", "merge", "prepare", "read"]

_LOCK_SECONDS = 30.0


def read(path: Path, device: str) -> list[Entry]:
    """The entries of a cache file, those of other versions of attnspan among them; none without a file.

    Args:
        path: The file.
        device: Whose it should be.

    Raises:
        OptionError: It is damaged, of another schema or device, or cannot be read.

    Example:
        >>> read(Path("nowhere.json"), "a machine")
        []
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(path, f"expected a readable file, got {error.strerror}") from None
    try:
        return [Entry.from_json(value) for value in parse_cache(content, device)]
    except ValueError as error:
        raise _unusable(path, str(error).removesuffix(".")) from None


def _unusable(path: Path, why: str) -> OptionError:
    return OptionError(
        str(path),
        expected="a tuning cache of this machine",
        got=f"another file ({why})",
        remedy="Run `attnspan tune`, which puts it aside and starts a new one, or name another file",
    )


def merge(path: Path, device: str, entries: Iterable[Entry]) -> Path | None:
    """Add entries to a cache file; those of the same key and version are replaced.

    Args:
        path: The file; made where it is missing.
        device: Whose it is.
        entries: What to add.

    Returns:
        Where the old file was put, if it could not be used; else None.

    Raises:
        OptionError: The folder cannot be written, or the lock is held for too long.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "tuned.json")
        >>> from attnspan.kernels.tuned import Key
        >>> key = Key("cpu", "forward", "avx2", "float32", 64, 10, "half")
        >>> merge(path, "a machine", [Entry(key, {}, version="1", contender={})])
        >>> [entry.key == key for entry in read(path, "a machine")]
        [True]
    """
    with _locked(path):
        aside = None
        try:
            known = read(path, device)
        except OptionError:
            known, aside = [], path.with_name(f"{path.name}.bad")
            with _explained(path):
                os.replace(path, aside)
        merged = {(entry.key, entry.version): entry for entry in (*known, *entries)}
        _write(path, device, merged.values())
    return aside


def clear(path: Path) -> bool:
    """Remove a cache file; whether there was one.

    Args:
        path: The file.

    Raises:
        OptionError: It cannot be removed.

    Example:
        >>> import tempfile
        >>> clear(Path(tempfile.mkdtemp(), "tuned.json"))
        False
    """
    if not path.exists():
        return False
    with _locked(path), _explained(path):
        path.unlink(missing_ok=True)
    return True


def prepare(path: Path) -> None:
    """Raise now rather than after a long search if the file could not be written.

    Args:
        path: The file; its folder is made.

    Raises:
        OptionError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> prepare(Path(tempfile.mkdtemp(), "new", "tuned.json"))
    """
    with _locked(path), _explained(path):
        draft = _draft(path)
        draft.touch()
        draft.unlink()


def _write(path: Path, device: str, entries: Iterable[Entry]) -> None:
    ordered = sorted(entries, key=lambda entry: (*vars(entry.key).values(), entry.version))
    value = {"schema": SCHEMA, "device": device, "entries": [to_plain(entry) for entry in ordered]}
    draft = _draft(path)
    with _explained(path):
        try:
            with draft.open("w") as file:
                json.dump(value, file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the new name on an empty file
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _draft(path: Path) -> Path:
    """Where the next file is written, by who holds the lock; what a killed process left is overwritten."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the file. It stays there: removing it would let two processes hold two locks."""
    lock = path.with_name(f"{path.name}.lock")
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if fcntl is not None:
            file = lock.open("a")
    if fcntl is None:
        with _exclusive_file(lock):
            yield
        return
    with file:
        with _explained(path):
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, and when the process dies
        yield


@contextmanager
def _exclusive_file(lock: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            lock.open("x").close()
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise OptionError(
                    str(lock),
                    expected=f"to be free within {_LOCK_SECONDS:.0f} s",
                    got="a lock that is held",
                    remedy="Remove the file if no other `attnspan tune` runs",
                ) from None
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            str(path),
            expected="a place that can be written",
            got=error.strerror or str(error),
            remedy="Name another with --cache or ATTNSPAN_TUNE_CACHE",
        ) from None
