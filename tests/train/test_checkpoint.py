"""A checkpoint is whole or absent; a damaged one is named."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from attnspan.errors import OptionError
from attnspan_lab.bench.monitor.lines import MetricsLog
from train import checkpoint
from train.checkpoint import CheckpointStore
from train.config import CheckpointError


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


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)

    def __deepcopy__(self, _: object) -> Evil:
        return self


def rewrite(folder: Path, **files: bytes) -> None:
    """Files of a checkpoint by another hand, which makes the manifest fit."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, content in files.items():
        (folder / name).write_bytes(content)
        manifest["files"][name] = (len(content), checkpoint._digest(folder / name))
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("where", ["instead", "inside", "rank"])
def test_metadata_run_no_code(tmp_path: Path, where: str) -> None:
    folder, mark = save(CheckpointStore(tmp_path), 1), tmp_path / "ran"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["weight"] = evil = Evil(mark)
    content = pickle.dumps(evil if where == "instead" else metadata)
    if where == "rank":  # Torch looks for these where it cannot read the other.
        rewrite(folder, **{".metadata": b"", "__0.metadata": content})
    else:
        rewrite(folder, **{".metadata": content})
    got = "EOFError" if where == "rank" else f"it names {os.mkdir.__module__}.mkdir"
    with pytest.raises(CheckpointError, match=rf"\.metadata to have only sizes .*{got}.*nothing .* was run"):
        load(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../step-00000002/__0_0.distcp", "/etc/passwd"])
def test_metadata_read_no_file_from_elsewhere(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    folder, _ = save(store, 1), save(store, 2)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    copy = {name: (folder / "__0_0.distcp").read_bytes()} if name.startswith("..") else {}
    rewrite(folder, **{".metadata": pickle.dumps(metadata)}, **copy)
    with pytest.raises(CheckpointError, match=rf"tensors in \['{name}'\]"):
        load(tmp_path, 1)


def test_what_is_no_tensor_runs_no_code(tmp_path: Path) -> None:
    mark, store = tmp_path / "ran", CheckpointStore(tmp_path)
    options = {"betas": (0.9, 0.95), "names": ["a"], "fused": None}
    store.save(1, {"options": options, "evil": Evil(mark)}, {})
    store.wait()
    read: dict[str, object] = {"betas": None, "names": [None], "fused": 1}
    store.load({"options": read})
    assert read == options
    with pytest.raises(CheckpointError, match=r"expected evil to be data, got .*mkdir"):
        store.load({"evil": None})
    assert not mark.exists()


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
    with pytest.raises(CheckpointError, match=r"bytes instead of.*Start a new run"):
        load(tmp_path)


@pytest.mark.parametrize("line", [b"{", b"[]", b"3", b"{}", b"\xff", b'{"step": "1"}'])
def test_a_bad_line_of_the_metrics_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"line 2 of .*metrics\.jsonl.*Remove that line"):
        MetricsLog(path, 3)
    assert path.read_bytes() == content
