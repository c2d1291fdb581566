"""A checkpoint is whole or absent; a damaged one is named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from attnspan.train import checkpoint
from attnspan.train.checkpoint import CheckpointStore
from attnspan.train.config import CheckpointError
from attnspan.train.progress import MetricsLog


def save(store: CheckpointStore, step: int) -> Path:
    weight = torch.full((1000,), float(step))
    store.save(step, {"weight": weight}, {"note": f"at {step}"})
    weight.fill_(-1.0)  # Training goes on while it is written.
    store.wait()
    return store.root / f"step-{step:08d}"


def load(root: Path, step: int | None = None) -> tuple[int, str, float]:
    weight = torch.zeros(1000)
    at, progress = CheckpointStore(root).load({"weight": weight}, step)
    assert (weight == weight[0]).all()
    return at, progress["note"], float(weight[0])


def test_what_is_saved_comes_back_and_the_last_two_are_kept(tmp_path: Path) -> None:
    names = ["step-backup", "step-00000001-good", ".step-mine.tmp", "step-1"]
    for name in names:
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "step-00000003", "step-00000004"}
    assert load(tmp_path) == (4, "at 4", 4.0)
    assert load(tmp_path, 3) == (3, "at 3", 3.0)


class Killed(BaseException):
    """The process ends here."""

    def __str__(self) -> str:
        return "killed"


MOMENTS = [(checkpoint, "_describe"), (checkpoint, "_flush_folder"), (checkpoint, "_digest"), (os, "fsync")]
MOMENTS += [(Path, "rename"), (CheckpointStore, "_make_room"), (FileSystemWriter, "write_data")]


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=type)
@pytest.mark.parametrize(("where", "moment"), MOMENTS, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("count", [1, 2])
def test_an_end_at_any_moment_leaves_the_old_or_the_new(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    moment: str,
    count: int,
    error: BaseException,
) -> None:
    save(CheckpointStore(tmp_path), 1)
    calls, original = [], getattr(where, moment)

    def ending(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == count:
            raise error
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(where, moment, ending)
        ended = ""
        try:
            save(CheckpointStore(tmp_path), 2)
        except (Killed, CheckpointError) as said:
            ended = str(said)
        drafts = list(tmp_path.glob(".step-*.tmp"))
    assert (len(calls) >= count) == bool(ended), "nothing is swallowed"
    full = "No space left" in ended and "Free space" in ended and not drafts
    assert not ended or full or isinstance(error, Killed), "the room is given back"
    for folder in tmp_path.glob("step-*"):
        assert (folder / "manifest.json").is_file(), "what has a checkpoint's name is whole"
    assert load(tmp_path) in [(1, "at 1", 1.0), (2, "at 2", 2.0)]
    store = CheckpointStore(tmp_path)
    store.load({"weight": torch.zeros(1000)})
    save(store, 3)
    assert load(tmp_path) == (3, "at 3", 3.0)
    assert not list(tmp_path.glob(".*")), "what was left over is gone"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replaced(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


DAMAGES = [(file, how) for file in ("__0_0.distcp", ".metadata") for how in (truncate, flip, Path.unlink)]
MANIFESTS = [b"{}", b"[]", b"\xff\xfe", b'{"files": {}, "progress": {"step": 2}}']
MANIFESTS += [b'{"files": {".metadata": 2, "__0_0.distcp": 3}, "progress": {"step": 2}}']
DAMAGES += [("manifest.json", how) for how in (truncate, Path.unlink, *map(replaced, MANIFESTS))]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_damage_is_named_with_the_older_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    damage(save(store, 2) / file)
    with pytest.raises(CheckpointError, match=r"--resume --from-step 1\.") as caught:
        load(tmp_path)
    assert file in str(caught.value)
    fresh = CheckpointStore(tmp_path)
    assert fresh.load({"weight": torch.zeros(1000)}, 1) == (1, {"note": "at 1"})
    fresh.go_back(1)
    assert load(tmp_path) == (1, "at 1", 1.0), "a restart goes on from there too"
    save(fresh, 2)
    assert load(tmp_path) == (2, "at 2", 2.0)


def test_absence_and_the_only_one_damaged_are_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got none\. Start the run without --resume"):
        load(tmp_path / "nowhere")
    folder = save(CheckpointStore(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"no folder step-00000009.*--from-step"):
        load(tmp_path, 9)
    with pytest.raises(CheckpointError, match=r"step-00000001 .*other"):
        CheckpointStore(tmp_path).load({"other": torch.zeros(3)})
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert listed == {path.name for path in folder.iterdir()} - {"manifest.json"}
    truncate(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"bytes instead of.*Start the run anew"):
        load(tmp_path)


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b"{}", b"\xff", b'{"step": "1"}'])
def test_a_bad_line_of_the_metrics_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"line 2 of .*metrics\.jsonl.*Remove that line"):
        MetricsLog(path, 3)
    assert path.read_bytes() == content
