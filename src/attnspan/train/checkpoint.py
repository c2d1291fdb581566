"""Checkpoints that are either whole or absent, whenever the process dies.

A checkpoint is written into a temporary folder, with a manifest of its files' sizes and hashes, flushed to
the disk, and renamed; only then does the file ``LATEST`` name it, and only then are older ones removed. One
of the same step is renamed aside just before, and returns to its name if the process dies in between.

Several ranks write one checkpoint, each its share of the tensors, into a folder that all of them see; the
first rank alone makes, checks, renames and removes. Any number of ranks can read what another number wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from attnspan.train.errors import CheckpointError
from attnspan.train.ranks import ALONE, Ranks

__all__ = ["CheckpointStore", "step_of"]

_LATEST = "LATEST"
_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
_HIDDEN = re.compile(r"\.step-\d{8}\.(tmp|old)")  # a draft; what a draft is about to replace


def step_of(name: str) -> int | None:
    """The step of a checkpoint, from the name of its folder; None when no checkpoint has such a name.

    Example:
        >>> step_of("step-00000012"), step_of("step-backup")
        (12, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class CheckpointStore:
    """The checkpoints of one run. All ranks call `save`, `load` and `point_at`, the first alone the rest.

    Args:
        root: Folder that holds them; made when the first one is written.
        ranks: Who writes and reads them together; by default this process alone.

    Example:
        >>> import tempfile, torch
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()))
        >>> _ = store.save(10, {"weight": torch.ones(2)}, {"epoch": 0})
        >>> weight = torch.zeros(2)
        >>> store.load({"weight": weight}), weight.tolist()
        ((10, {'epoch': 0}), [1.0, 1.0])
    """

    def __init__(self, root: Path, ranks: Ranks = ALONE) -> None:
        self.root, self.ranks = root, ranks
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

        Raises:
            CheckpointError: It cannot be written. Those that were there before are still whole.
        """
        name = f"step-{step:08d}"
        target, draft = self.root / name, self.root / f".{name}.tmp"
        try:
            self.ranks.first(lambda: self._make_room(draft))
            with _torch_alone():
                writer = FileSystemWriter(draft, sync_files=True)
                save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            self.ranks.first(lambda: self._publish(draft, target, {"step": step, **progress}))
        except OSError as error:
            if self.ranks.is_first:
                shutil.rmtree(draft, ignore_errors=True)
            failure = CheckpointError(
                expected=f"to write {target}",
                got=str(error),
                remedy=f"free space on the disk of {self.root} and make it writable, then pass --resume",
            )
            failure.shared = True  # What torch and the first rank report reaches all ranks.
            raise failure from error
        self.ranks.first(lambda: self._prune(name))
        return target

    @property
    def _group(self) -> ProcessGroup | None:
        return self.ranks.group

    def _make_room(self, draft: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._restore()
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed while it wrote

    def _publish(self, draft: Path, target: Path, progress: dict[str, Any]) -> None:
        _write(draft / _PROGRESS, json.dumps(progress))
        _write(draft / _MANIFEST, json.dumps(_describe(draft), indent=2))
        _flush_folder(draft)
        self._replace(draft, target)
        self._point(target.name)

    def latest(self) -> str | None:
        """Name of the latest checkpoint, or None when there is none yet.

        Raises:
            CheckpointError: The file that has the name is damaged or lost.
        """
        pointer = self.root / _LATEST
        if not pointer.is_file() and len(self.steps()) < 2:
            # A process may die between the very first rename and the pointer; one alone needs none.
            return next(iter(self._names()), None)
        try:
            name = pointer.read_text().strip()
        except (OSError, ValueError) as error:
            raise self._damaged(pointer, str(error)) from None
        if step_of(name) is None:
            raise self._damaged(pointer, f"it says {name!r}, which is no checkpoint's name")
        return name

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, damaged or not, in order.

        Example:
            >>> CheckpointStore(Path("/none")).steps()
            []
        """
        self._restore()
        return sorted(step for path in _folders(self.root) if (step := step_of(path.name)) is not None)

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
        name, progress = self.ranks.first(lambda: self._whole(step))
        try:
            with _torch_alone():
                reader = FileSystemReader(self.root / name)
                load(tensors, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        except OSError as error:
            raise self._unreadable(self.root / name, error) from error
        self._kept = [name]
        return int(progress.pop("step")), progress

    def point_at(self, step: int) -> None:
        """Make a checkpoint that is there the latest: a run goes on from it, and so it does after a restart.

        Args:
            step: Which one.
        """
        self.ranks.first(lambda: self._point(f"step-{step:08d}"))

    def _whole(self, step: int | None) -> tuple[str, dict[str, Any]]:
        """Name and progress of a checkpoint, once every byte of it is known to be as it was written."""
        self._restore()
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
        return name, json.loads((self.root / name / _PROGRESS).read_text())

    def _names(self) -> list[str]:
        return [f"step-{step:08d}" for step in self.steps()]

    def _restore(self) -> None:
        """Give back its name to what was renamed aside by a process that died before the second rename."""
        for path in _folders(self.root):
            target = self.root / path.stem.removeprefix(".")
            if _HIDDEN.fullmatch(path.name) and path.suffix == ".old" and not target.exists():
                path.rename(target)

    def _replace(self, draft: Path, target: Path) -> None:
        aside = self.root / f".{target.name}.old"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        try:
            draft.rename(target)
        except OSError:
            self._restore()
            raise
        _flush_folder(self.root)

    def _verify(self, name: str) -> None:
        folder = self.root / name
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(folder / _MANIFEST, str(error)) from None
        if not _is_manifest(manifest, folder):
            raise self._damaged(folder / _MANIFEST, "it does not list the checkpoint's files")
        for file, (size, digest) in manifest.items():
            path = folder / file
            if not path.is_file():
                raise self._damaged(path, "it is missing")
            if path.stat().st_size != size:
                raise self._damaged(path, f"it has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise self._damaged(path, "its content has changed")

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        return CheckpointError(
            expected=f"{path} as it was written",
            got=f"a damaged file: {reason}",
            remedy=self._without(path.parent.name),
        )

    def _unreadable(self, folder: Path, error: OSError) -> CheckpointError:
        return CheckpointError(
            expected=f"{folder} to have the state of this configuration",
            got=str(error),
            remedy=f"restore the run's config.json if it was edited, or {self._without(folder.name)}",
        )

    def _without(self, name: str) -> str:
        """What to do when a checkpoint, or the pointer to it, is of no use."""
        others = [step for step in self.steps() if f"step-{step:08d}" != name]
        if not others:
            return "start the run anew, under another --name"
        return f"resume from one that is there: --resume --from-step {others[-1]}"

    def _point(self, name: str) -> None:
        draft = self.root / f".{_LATEST}.tmp"
        _write(draft, name + "\n")
        draft.rename(self.root / _LATEST)
        _flush_folder(self.root)

    def _prune(self, name: str) -> None:
        self._kept = [*self._kept, name][-_KEPT:]
        for path in _folders(self.root):
            ours = step_of(path.name) is not None or _HIDDEN.fullmatch(path.name)
            if ours and path.name not in self._kept:
                shutil.rmtree(path)


@contextmanager
def _torch_alone() -> Iterator[None]:
    """Without torch's warning that there is a single process: that is what ``no_dist`` says.

    Its CheckpointException, which is no Exception, becomes an OSError; an interrupt inside it stays one.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            for cause in causes:
                if not isinstance(cause, Exception):
                    raise cause from None
            raise OSError("; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)) from None


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _is_manifest(manifest: Any, folder: Path) -> bool:
    """Whether it lists the files that every checkpoint has, and all that hold tensors."""
    needed = {_PROGRESS, ".metadata", *(path.name for path in folder.glob("*.distcp"))}
    return (
        isinstance(manifest, dict)
        and manifest.keys() >= needed
        and all(isinstance(entry, list) and len(entry) == 2 for entry in manifest.values())
    )


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
