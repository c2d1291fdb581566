"""A checkpoint is whole or absent, has no code, and an error names a damaged one."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from train import checkpoint
from train.checkpoint import CheckpointStore
from train.config import CheckpointError

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def save(store, step):
    weight = torch.full((1000,), float(step))
    store.save(step, {"weight": weight}, {"note": f"at {step}"})
    weight.fill_(-1.0)  # Training goes on while it is written.
    store.wait()
    return store.root / f"step-{step:08d}"


def load(root, step=None):
    weight = torch.zeros(1000)
    at, progress = CheckpointStore(root).load({"weight": weight}, step)
    assert (weight == weight[0]).all()
    return at, progress["note"], float(weight[0])


def test_what_is_saved_comes_back_and_the_last_two_are_kept(tmp_path):
    names = {"step-backup", "step-00000001-good", ".step-mine.tmp", "step-1"}
    for name in names:
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path)
    folders = [save(store, step) for step in (1, 2, 3, 4)]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "step-00000003", "step-00000004"}
    assert load(tmp_path) == (4, "at 4", 4.0)
    assert load(tmp_path, 3) == (3, "at 3", 3.0)
    assert list(json.loads((folders[3] / "manifest.json").read_text())["files"]) == [SHARD]
    assert {path.name for path in folders[3].iterdir()} == {SHARD, "manifest.json"}


class Killed(BaseException):
    """The process ends here."""


MOMENTS = [(checkpoint, "_flush_folder"), (checkpoint, "_digest"), (os, "fsync")]
MOMENTS += [(Path, "rename"), (CheckpointStore, "_make_room"), (FileSystemWriter, "_write_data")]


@pytest.mark.parametrize("error", [Killed("killed"), OSError(errno.ENOSPC, "No space left")], ids=type)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment[1])
@pytest.mark.parametrize("count", [1, 2])
def test_an_end_at_any_moment_leaves_the_old_or_the_new(tmp_path, monkeypatch, moment, count, error):
    save(CheckpointStore(tmp_path), 1)
    calls, original = [], getattr(*moment)

    def ending(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            raise error
        return original(*args, **kwargs)

    ended = ""
    with monkeypatch.context() as patched:
        patched.setattr(*moment, ending)
        try:
            save(CheckpointStore(tmp_path), 2)
        except (Killed, CheckpointError) as said:
            ended = str(said)
        drafts = list(tmp_path.glob(".step-*.tmp"))
    assert (len(calls) >= count) == bool(ended), "no error is swallowed"
    full = "No space left" in ended and "Free space" in ended and not drafts
    assert not ended or full or isinstance(error, Killed), "the space is free again"
    assert load(tmp_path) in [(1, "at 1", 1.0), (2, "at 2", 2.0)]
    store = CheckpointStore(tmp_path)
    store.load({"weight": torch.zeros(1000)})
    save(store, 3)
    assert load(tmp_path) == (3, "at 3", 3.0)
    assert not list(tmp_path.glob(".*")), "leftovers are gone"


def truncated(content):
    return content[:-10]


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


MANIFESTS = [b"{}", b"[]", b"\xff\xfe", b'{"files": {}, "progress": {"step": 2}}']
MANIFESTS += [f'{{"files": {{"{SHARD}": 3}}, "progress": {{"step": 2}}}}'.encode()]
DAMAGES = [(SHARD, how) for how in (truncated, flipped, None)]
DAMAGES += [("manifest.json", how) for how in (truncated, None, *MANIFESTS)]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_damage_is_named_with_the_older_checkpoint(tmp_path, damage, file):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2) / file
    path.write_bytes(damage(path.read_bytes()) if callable(damage) else damage or b"")
    if damage is None:
        path.unlink()
    older = r"--resume --from-step 1, or sample\.py .*/step-00000001\."
    with pytest.raises(CheckpointError, match=rf"{file} as it was written, got a damaged file: .*{older}"):
        load(tmp_path)
    fresh = CheckpointStore(tmp_path)
    assert fresh.load({"weight": torch.zeros(1000)}, 1) == (1, {"note": "at 1"})
    fresh.go_back(1)
    assert load(tmp_path) == (1, "at 1", 1.0), "a restart continues from there too"
    save(fresh, 2)
    assert load(tmp_path) == (2, "at 2", 2.0)


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [SHARD, ".metadata", "other.safetensors"])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, name):
    folder, mark = save(CheckpointStore(tmp_path), 1), tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Evil(mark)))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][SHARD] = [(folder / SHARD).stat().st_size, checkpoint._digest(folder / SHARD)]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if name == ".metadata":
        assert load(tmp_path) == (1, "at 1", 1.0), "torch reads only the safetensors files"
    else:
        with pytest.raises(CheckpointError, match=r"step-00000001"):
            load(tmp_path)
    assert not mark.exists()


def test_the_error_names_what_is_absent(tmp_path):
    with pytest.raises(CheckpointError, match=r"got none\. Start the run without --resume"):
        load(tmp_path / "nowhere")
    folder = save(CheckpointStore(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"no folder step-00000009.*--from-step"):
        load(tmp_path, 9)
    with pytest.raises(CheckpointError, match=r"step-00000001 to contain the state .*other"):
        CheckpointStore(tmp_path).load({"other": torch.zeros(3)})
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"bytes instead of.*Start a new run"):
        load(tmp_path)
