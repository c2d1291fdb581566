"""Atomic checkpoints, written while training continues. A crash never leaves a partial checkpoint.

`save` copies the state. A thread writes it into a temporary folder: first the tensors with
torch.distributed.checkpoint, then a manifest of all files. The folder is flushed to disk and renamed. Only
then, older checkpoints are removed.

Several ranks write one checkpoint into a folder that all of them see, each rank its share of the tensors.
Only the first rank creates, renames and removes folders. A different number of ranks can read the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from train.config import CheckpointError
from train.parallelize import ALONE, Ranks
from train.plain import PlainPlanner, PlainReader

__all__ = ["CheckpointStore", "step_of"]

_MANIFEST = "manifest.json"
_KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
_HIDDEN = re.compile(
    r"\.step-\d{8}\.(tmp|left)"
)  # a draft, or a checkpoint after the step that a run went back to


def step_of(name: str) -> int | None:
    """Parse the step of a checkpoint from its folder's name. None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _resumed(step: int) -> str:
    return f"Resume from an existing checkpoint: --resume --from-step {step}"


class CheckpointStore:
    """The checkpoints of one run, in a folder. All ranks call `save`, `wait` and `load` together.

    If a checkpoint cannot be used, ``instead`` returns the remedy: how to use another one, from its step.

    Example:
        >>> import tempfile, torch
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()))
        >>> store.save(10, {"weight": torch.ones(2)}, {"epoch": 0})
        >>> store.wait()
        >>> weight = torch.zeros(2)
        >>> store.load({"weight": weight}), weight.tolist()
        ((10, {'epoch': 0}), [1.0, 1.0])
    """

    def __init__(self, root: Path, ranks: Ranks = ALONE, instead: Callable[[int], str] = _resumed) -> None:
        self.root, self.ranks, self._instead = root, ranks, instead
        # Steps that this process wrote or read, oldest first. The last two must not be removed.
        self._kept: list[str] = []
        self._writing: tuple[Path, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # torch warns about a single process, although ``no_dist`` requests it. Its thread warns as well.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

    def save(self, step: int, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
        """Copy a state for `torch.distributed.checkpoint` and start to write it, with progress as JSON.

        When the write is complete, this is the latest checkpoint.
        """
        self.wait()
        target, group = self.root / f"step-{step:08d}", self.ranks.saver
        draft = _hidden(target, "tmp")
        state: Any
        with self._said(target):
            self.ranks.first(lambda: self._make_room(draft))
            writer = FileSystemWriter(draft, sync_files=True)
            state = async_save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        task = self._thread.submit(self._finish, state, draft, target, {"step": step, **progress})
        self._writing = target, task

    def wait(self) -> None:
        """Wait for the write that `save` started. If it fails, all ranks raise a CheckpointError."""
        if self._writing is not None:
            (target, task), self._writing = self._writing, None
            with self._said(target):
                self.ranks.together(task.result)

    @contextmanager
    def _said(self, target: Path) -> Iterator[None]:
        try:
            with _torch_errors():
                yield
        except OSError as error:
            if self.ranks.is_first:
                shutil.rmtree(_hidden(target, "tmp"), ignore_errors=True)
            again = "pass --resume" if self.steps() else "start the run again"
            remedy = f"Free space on the disk of {self.root} and make it writable, then {again}"
            failure = CheckpointError.of(f"to write {target}", error, remedy)
            failure.shared = True  # Errors of torch and of the first rank reach all ranks.
            raise failure from error

    def _finish(self, state: Future[Any], draft: Path, target: Path, progress: dict[str, Any]) -> None:
        """Write the manifest and publish the checkpoint after torch has written the tensors.

        Runs in the thread.
        """
        with _torch_errors():
            state.result()
        # Each rank reads its own files.
        own = _describe(draft, f"__{self.ranks.number}_*.distcp")
        everyone: list[Any] = [own] * self.ranks.world
        if self.ranks.saver is not None:
            dist.all_gather_object(everyone, own, group=self.ranks.saver)
        if not self.ranks.is_first:
            return
        files = {name: entry for each in everyone for name, entry in each.items()}
        manifest = {"progress": progress, "files": files | _describe(draft, ".metadata")}
        with (draft / _MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(draft)
        draft.rename(target)
        _flush_folder(self.root)
        self._kept = [*self._kept, target.name][-_KEPT:]
        for path in _folders(self.root):
            ours = step_of(path.name) is not None or _HIDDEN.fullmatch(path.name)
            if ours and path.name not in self._kept:
                shutil.rmtree(path)

    def _make_room(self, draft: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed during a write

    def steps(self) -> list[int]:
        """List the steps of the existing checkpoints in order, including damaged ones."""
        return sorted(step for path in _folders(self.root) if (step := step_of(path.name)) is not None)

    def load(self, tensors: dict[str, Any], step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into a state, by default the latest. Return its step and progress."""
        folder, manifest = self.ranks.first(lambda: self._manifest(step))
        self.ranks.together(lambda: self._verify(folder, manifest["files"]))
        reader = self.ranks.together(lambda: PlainReader(folder, list(manifest["files"])))
        try:
            with _torch_errors():
                group, planner = self.ranks.host, PlainPlanner()
                given: dict[str, Any] = {"storage_reader": reader, "planner": planner}
                load(tensors, **given, process_group=group, no_dist=group is None)
        except OSError as error:
            remedy = f"Restore the run's config.json if it was edited. {self._without(folder)}"
            wanted = f"{folder} to contain the state of this configuration"
            raise CheckpointError.of(wanted, error, remedy) from error
        self._kept = [folder.name]
        return int(manifest["progress"].pop("step")), manifest["progress"]

    def go_back(self, step: int) -> None:
        """Set later checkpoints aside until the next `save`, so that a restart continues from this step."""
        for path in (self.root / f"step-{later:08d}" for later in self.steps() if later > step):
            shutil.rmtree(_hidden(path, "left"), ignore_errors=True)
            path.rename(_hidden(path, "left"))

    def _manifest(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """Find the folder and manifest of a checkpoint."""
        there = self.steps()
        wanted = step if step is not None else there[-1] if there else None
        folder = self.root / ("none" if wanted is None else f"step-{wanted:08d}")
        got = "none" if wanted is None else f"no folder {folder.name} (existing steps: {there})"
        remedy = (
            self._without(folder)
            if there
            else "Start the run without --resume, or wait for its first checkpoint"
        )
        CheckpointError.unless(folder.is_dir(), f"a checkpoint in {self.root}", got, remedy)
        path, needed = folder / _MANIFEST, {".metadata", *(file.name for file in folder.glob("*.distcp"))}
        try:
            manifest = json.loads(path.read_text())
            files, _ = manifest["files"], manifest["progress"]["step"]
            if files.keys() >= needed and all(len(entry) == 2 for entry in files.values()):
                return folder, manifest
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise self._damaged(path, "it is missing, or does not list the checkpoint's files")

    def _verify(self, folder: Path, files: dict[str, list[Any]]) -> None:
        """Compare files with the manifest, each rank a part: torch does not detect damaged tensors."""
        for file, (size, digest) in sorted(files.items())[self.ranks.number :: self.ranks.world]:
            path = folder / file
            if not path.is_file():
                raise self._damaged(path, "it is missing")
            if path.stat().st_size != size:
                raise self._damaged(path, f"it has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise self._damaged(path, "its content has changed")

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        wanted, got = f"{path} as it was written", f"a damaged file: {reason}"
        return CheckpointError.of(wanted, got, self._without(path.parent))

    def _without(self, folder: Path) -> str:
        """Suggest a remedy for a checkpoint that cannot be used."""
        others = [step for step in self.steps() if f"step-{step:08d}" != folder.name]
        if not others:
            return "Start a new run with another --name"
        return self._instead(others[-1])


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise torch's CheckpointException, which is no Exception, as an OSError. Other errors stay."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if not isinstance(cause, Exception) or isinstance(cause, CheckpointError):
                raise cause from None
        raise OSError("; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)) from None


def _hidden(folder: Path, why: str) -> Path:
    return folder.with_name(f".{folder.name}.{why}")


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _describe(folder: Path, pattern: str) -> dict[str, tuple[int, str]]:
    return {path.name: (path.stat().st_size, _digest(path)) for path in sorted(folder.glob(pattern))}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _flush_folder(folder: Path) -> None:
    """Flush a folder to disk. Only then, renames and new names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
