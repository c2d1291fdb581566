"""Atomic checkpoints, written while training continues. A crash never leaves a partial checkpoint.

`save` copies the state. A thread writes it into a temporary folder: first the tensors as safetensors files,
with torch.distributed.checkpoint, then a manifest of all files. The folder is flushed to disk and renamed.
Only then, older checkpoints are removed.

Several ranks write one checkpoint into a folder that all of them see, each rank its share of the tensors.
Only the first rank creates, renames and removes folders. A different number of ranks can read the checkpoint.
A safetensors file has only tensors, so no code that a file names is ever run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from train.config import CheckpointError
from train.parallelize import ALONE, Ranks

__all__ = ["CheckpointStore", "step_of"]

_MANIFEST = "manifest.json"
_KEPT = 2
_NAME = re.compile(r"step-(\d{8})")
# A draft, or a checkpoint after the step that a run went back to.
_HIDDEN = re.compile(r"\.step-\d{8}\.(tmp|left)")


def step_of(name: str) -> int | None:
    """Parse the step of a checkpoint from its folder's name. None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class CheckpointStore:
    """The checkpoints of one run, in a folder. All ranks call `save`, `wait` and `load` together.

    Example:
        >>> import tempfile, torch
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()))
        >>> store.save(10, {"weight": torch.ones(2)}, {"epoch": 0})
        >>> store.wait()
        >>> weight = torch.zeros(2)
        >>> store.load({"weight": weight}), weight.tolist()
        ((10, {'epoch': 0}), [1.0, 1.0])
    """

    def __init__(self, root: Path, ranks: Ranks = ALONE) -> None:
        self.root, self.ranks = root, ranks
        # Steps that this process wrote or read, oldest first. The last two must not be removed.
        self._kept: list[str] = []
        self._writing: tuple[Path, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # torch warns about a single process, although ``no_dist`` requests it. Its thread warns as well.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

    def steps(self) -> list[int]:
        """List the steps of the existing checkpoints in order, including damaged ones."""
        return sorted(step for path in _folders(self.root) if (step := step_of(path.name)) is not None)

    def save(self, step: int, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
        """Copy a nested dict of tensors and start to write it, with progress as JSON.

        When the write is complete, this is the latest checkpoint.
        """
        self.wait()
        target, group = self.root / f"step-{step:08d}", self.ranks.saver
        draft = _hidden(target, "tmp")
        with self._saving(target):
            self.ranks.first(lambda: self._make_room(draft))
            writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
            how: Any = {"storage_writer": writer, "process_group": group, "no_dist": group is None}
            written: Any = async_save(tensors, **how)
        task = self._thread.submit(self._finish, written, draft, target, {"step": step, **progress})
        self._writing = target, task

    def wait(self) -> None:
        """Wait for the write that `save` started. If it fails, all ranks raise a CheckpointError."""
        if self._writing is not None:
            (target, task), self._writing = self._writing, None
            with self._saving(target):
                self.ranks.together(task.result)

    def _saving(self, target: Path) -> AbstractContextManager[None]:
        def remedy() -> str:
            if self.ranks.is_first:
                shutil.rmtree(_hidden(target, "tmp"), ignore_errors=True)
            again = "pass --resume" if self.steps() else "start the run again"
            return f"Free space on the disk of {self.root} and make it writable, then {again}"

        return _explained(f"to write {target}", remedy)

    def _make_room(self, draft: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed during a write

    def _finish(self, tensors: Future[Any], draft: Path, target: Path, progress: dict[str, Any]) -> None:
        """Publish the checkpoint with its manifest after torch has written the tensors. Runs in a thread."""
        tensors.result()
        paths = draft.glob(f"shard-{self.ranks.number + 1:05d}-*")  # Each rank reads its own files.
        own = {path.name: (path.stat().st_size, _digest(path)) for path in paths}
        everyone: list[Any] = [own] * self.ranks.world
        if self.ranks.saver is not None:
            dist.all_gather_object(everyone, own, group=self.ranks.saver)
        if not self.ranks.is_first:
            return
        files = {name: entry for each in everyone for name, entry in each.items()}
        with (draft / _MANIFEST).open("w") as file:
            json.dump({"progress": progress, "files": files}, file, indent=2)
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

    def load(self, tensors: dict[str, Any], step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into tensors, by default the latest. Return its step and progress."""
        folder, manifest = self.ranks.first(lambda: self._open(step))
        self.ranks.together(lambda: self._verify(folder, manifest["files"]))
        remedy = f"Restore the run's config.json if it was edited. {self._without(folder)}"
        with _explained(f"{folder} to contain the state of this configuration", lambda: remedy):
            group, reader = self.ranks.host, HuggingFaceStorageReader(str(folder))
            load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        self._kept = [folder.name]
        return int(manifest["progress"].pop("step")), manifest["progress"]

    def go_back(self, step: int) -> None:
        """Set later checkpoints aside until the next `save`, so that a restart continues from this step."""
        for path in (self.root / f"step-{later:08d}" for later in self.steps() if later > step):
            shutil.rmtree(_hidden(path, "left"), ignore_errors=True)
            path.rename(_hidden(path, "left"))

    def _open(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """Find the folder and manifest of a checkpoint."""
        there, wanted = self.steps(), f"a checkpoint in {self.root}"
        remedy = "Start the run without --resume, or wait for its first checkpoint"
        CheckpointError.unless(there, wanted, "none", remedy)
        folder = self.root / f"step-{there[-1] if step is None else step:08d}"
        got = f"no folder {folder.name} (existing steps: {there})"
        CheckpointError.unless(folder.is_dir(), wanted, got, self._without(folder))
        path = folder / _MANIFEST
        try:
            manifest = json.loads(path.read_text())
            files, _ = manifest["files"], manifest["progress"]["step"]
            needed = {file.name for file in folder.glob("*.safetensors")}
            if files and files.keys() >= needed and all(len(entry) == 2 for entry in files.values()):
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
        got = f"a damaged file: {reason}"
        return CheckpointError(f"{path} as it was written", got, self._without(path.parent))

    def _without(self, folder: Path) -> str:
        """Suggest a remedy for a checkpoint that cannot be used."""
        others = [step for step in self.steps() if f"step-{step:08d}" != folder.name]
        if not others:
            return "Start a new run with another --name"
        other = shlex.quote(str(self.root / f"step-{others[-1]:08d}"))
        return f"Use an existing checkpoint: --resume --from-step {others[-1]}, or sample.py {other}"


@contextmanager
def _explained(wanted: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Raise a CheckpointError instead of errors of torch and of the system, which reach all ranks."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        causes: list[BaseException] = [error]
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if not isinstance(cause, Exception):
                raise cause from None
        got = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        failure = CheckpointError(wanted, got, remedy())
        failure.shared = True
        raise failure from error


def _hidden(folder: Path, why: str) -> Path:
    return folder.with_name(f".{folder.name}.{why}")


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


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
