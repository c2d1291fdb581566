"""Checkpoints that are either whole or absent, whenever the process dies.

A checkpoint is written into a temporary folder, with a manifest of its files' sizes and hashes, flushed to
the disk, and renamed; only then does the file ``LATEST`` name it, and only then are older ones removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from attnspan.train.errors import CheckpointError

__all__ = ["CheckpointStore"]

_LATEST = "LATEST"
_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_KEPT = 2


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: Folder that holds them; made when the first one is written.

    Example:
        >>> import tempfile, torch
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()))
        >>> _ = store.save(10, {"weight": torch.ones(2)}, {"epoch": 0})
        >>> weight = torch.zeros(2)
        >>> store.load({"weight": weight}), weight.tolist()
        ((10, {'epoch': 0}), [1.0, 1.0])
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # Written or read by this process, oldest first: what must not be removed are the last two of these.
        self._kept: list[str] = []

    def save(self, step: int, tensors: dict[str, Any], progress: dict[str, Any]) -> Path:
        """Write a checkpoint and make it the latest.

        Args:
            step: Steps taken so far; names the checkpoint.
            tensors: State for `torch.distributed.checkpoint`.
            progress: What else is needed to go on; must fit into JSON.

        Returns:
            The folder of the checkpoint.
        """
        name = f"step-{step:08d}"
        target, draft = self.root / name, self.root / f".{name}.tmp"
        self.root.mkdir(parents=True, exist_ok=True)
        for stale in (draft, target):  # left by a process that was killed before it could say LATEST
            shutil.rmtree(stale, ignore_errors=True)
        with _single_process():
            save(tensors, storage_writer=FileSystemWriter(draft, sync_files=True), no_dist=True)
        _write(draft / _PROGRESS, json.dumps({"step": step, **progress}))
        _write(draft / _MANIFEST, json.dumps(_describe(draft), indent=2))
        _flush_folder(draft)
        draft.rename(target)
        _flush_folder(self.root)
        self._point_at(name)
        self._prune(name)
        return target

    def latest(self) -> str | None:
        """Name of the latest checkpoint, or None when there is none yet."""
        pointer = self.root / _LATEST
        return pointer.read_text().strip() if pointer.is_file() else None

    def load(self, tensors: dict[str, Any], step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Read a checkpoint into existing state.

        Args:
            tensors: State of the same structure that was saved; overwritten in place.
            step: Which checkpoint; None takes the latest.

        Returns:
            The step and the progress that were saved.

        Raises:
            CheckpointError: There is no such checkpoint, or one of its files is damaged.
        """
        name = self.latest() if step is None else f"step-{step:08d}"
        if name is None or not (self.root / name).is_dir():
            raise CheckpointError(
                expected=f"a checkpoint in {self.root}",
                got="none" if name is None else f"no folder {name} (there are: {self._names() or 'none'})",
                remedy="start the run without --resume"
                if not self._names()
                else "name one that exists with --from-step",
            )
        self._verify(name)
        with _single_process():
            load(tensors, storage_reader=FileSystemReader(self.root / name), no_dist=True)
        progress = json.loads((self.root / name / _PROGRESS).read_text())
        self._kept = [name]
        return int(progress.pop("step")), progress

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("step-*")) if self.root.is_dir() else []

    def _verify(self, name: str) -> None:
        folder = self.root / name
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(folder / _MANIFEST, str(error)) from None
        for file, (size, digest) in manifest.items():
            path = folder / file
            if not path.is_file():
                raise self._damaged(path, "it is missing")
            if path.stat().st_size != size:
                raise self._damaged(path, f"it has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise self._damaged(path, "its content has changed")

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        others = [int(name.removeprefix("step-")) for name in self._names() if name != path.parent.name]
        remedy = (
            f"resume from an older one: --resume --from-step {others[-1]}" if others else "start the run anew"
        )
        return CheckpointError(
            expected=f"{path} as it was written", got=f"a damaged file: {reason}", remedy=remedy
        )

    def _point_at(self, name: str) -> None:
        draft = self.root / f".{_LATEST}.tmp"
        _write(draft, name + "\n")
        draft.rename(self.root / _LATEST)
        _flush_folder(self.root)

    def _prune(self, name: str) -> None:
        self._kept = [*self._kept, name][-_KEPT:]
        for path in [*self.root.glob("step-*"), *self.root.glob(".step-*.tmp")]:
            if path.name not in self._kept:
                shutil.rmtree(path)


@contextmanager
def _single_process() -> Iterator[None]:
    """Without torch's warning that there is a single process: that is what ``no_dist`` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _describe(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: (path.stat().st_size, _digest(path)) for path in sorted(folder.iterdir())}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """A rename or a new name is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
