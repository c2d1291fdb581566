"""The cache file: merged, never lost, never half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from attnspan.bench.samples import Ratio, Timing
from attnspan.errors import OptionError
from attnspan.kernels import tuned
from attnspan.kernels.tuned import Key
from attnspan.tune import cache
from attnspan.tune.entry import Entry, Failure

DEVICE = "a machine"
SOURCE = str(Path(tuned.__file__).parents[2])
ENTRY = Entry(
    Key("cpu", "forward", "avx2", "float32", 64, 10, "half"),
    {"block_q": 96, "block_k": 0, "threads": 0},
    "1.0",
    {"block_q": 96, "block_k": 0, "threads": 0},
    Timing((0.002, 0.0021), calls=3),
    Timing((0.001, 0.0011), calls=5),
    Ratio(1.9, 1.8, 2.0, 2),
    "faster",
    tried=7,
    failures=(Failure({"block_q": 7}, "ValueError: no"),),
    problem={"heads": 8},
    date="2026-01-01T00:00:00+00:00",
)


def entry(head_dim: int, **changes: object) -> Entry:
    return replace(ENTRY, key=replace(ENTRY.key, head_dim=head_dim), **changes)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tuned.json"


def test_every_figure_comes_back(path: Path) -> None:
    cache.merge(path, DEVICE, [ENTRY])
    assert cache.read(path, DEVICE) == [ENTRY]


def test_what_is_written_is_what_the_kernel_reads(path: Path) -> None:
    cache.merge(path, DEVICE, [ENTRY, replace(ENTRY, version="0.9")])
    rows = tuned.rows(tuned.parse_cache(path.read_bytes(), DEVICE), "1.0")
    assert rows == [("forward", "avx2", "float32", 64, 10, "half", 96, 0, 0)]


def test_new_entries_replace_those_of_their_key_and_version(path: Path) -> None:
    cache.merge(path, DEVICE, [entry(32), entry(64), entry(64, version="0.9")])
    newer = entry(64, reason="newer")
    cache.merge(path, DEVICE, [newer])
    assert cache.read(path, DEVICE) == [entry(32), entry(64, version="0.9"), newer]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"schema": 1',
        b'{"schema": 0, "entries": {}}',
        b'{"schema": 2, "device": "a machine", "entries": []}',
        b'{"schema": 1, "device": "another", "entries": []}',
        b'{"schema": 1, "device": "a machine", "entries": [{"key": 3}]}',
    ],
)
def test_a_file_that_cannot_be_used_is_put_aside(path: Path, damage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    with pytest.raises(OptionError, match="expected a tuning cache of this machine"):
        cache.read(path, DEVICE)
    aside = cache.merge(path, DEVICE, [ENTRY])
    assert aside == path.with_name("tuned.json.bad")
    assert aside.read_bytes() == damage
    assert cache.read(path, DEVICE) == [ENTRY]
    assert cache.merge(path, DEVICE, [ENTRY]) is None


def test_an_entry_that_only_the_writer_reads_may_be_damaged(path: Path) -> None:
    cache.merge(path, DEVICE, [ENTRY])
    value = json.loads(path.read_text())
    value["entries"][0]["default"]["samples"] = "many"
    path.write_text(json.dumps(value))
    assert cache.merge(path, DEVICE, [entry(32)]) is not None
    assert cache.read(path, DEVICE) == [entry(32)]


_WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_cache import DEVICE, entry
from attnspan.tune import cache
path, first = Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for head_dim in range(first, first + 6):
    cache.merge(path, DEVICE, [entry(head_dim)])
"""


def writer(path: Path, first: int) -> subprocess.Popen[str]:
    """A process that waits for a word, and then adds six entries one by one."""
    command = [sys.executable, "-c", _WRITER, str(Path(__file__).parent), str(path), str(first)]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("damage from before")
    processes = [writer(path, first) for first in (100, 200, 300, 400)]
    try:
        go(*processes)
        while any(process.poll() is None for process in processes):
            with suppress(FileNotFoundError):  # between putting aside and the first write
                text = path.read_bytes()
                assert text == b"damage from before" or tuned.parse_cache(text, DEVICE), "never a part"
            time.sleep(0.002)
        assert [process.returncode for process in processes] == [0, 0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    expected = {first + n for first in (100, 200, 300, 400) for n in range(6)}
    assert {each.key.head_dim for each in cache.read(path, DEVICE)} == expected
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "tuned.json",
        "tuned.json.bad",
        "tuned.json.lock",
    ]


def test_a_writer_that_is_killed_leaves_a_whole_file_and_no_lock(path: Path) -> None:
    process = writer(path, 100)
    go(process)
    while not path.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = cache.read(path, DEVICE)
    assert before
    cache.merge(path, DEVICE, [entry(32)])
    assert cache.read(path, DEVICE) == [entry(32), *before]


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.merge(path, DEVICE, [ENTRY])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OptionError, match="expected a place that can be written, got No space left on device"
    ):
        cache.merge(path, DEVICE, [entry(32)])
    assert cache.read(path, DEVICE) == [ENTRY]
    assert not list(path.parent.glob("*.part"))


def test_a_place_that_cannot_be_written_is_named_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"expected a place that can be written.*--cache"):
        cache.prepare(tmp_path / "file" / "tuned.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OptionError, match="got Is a directory"):
        cache.prepare(tmp_path / "folder.json")
    cache.prepare(tmp_path / "new" / "tuned.json")
    assert not (tmp_path / "new" / "tuned.json").exists()


def test_clear_removes_it(path: Path) -> None:
    cache.merge(path, DEVICE, [ENTRY])
    assert cache.clear(path)
    assert not path.exists()
    assert not cache.clear(path)


def test_without_file_locks_a_file_is_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "fcntl", None)
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0.05)
    cache.merge(path, DEVICE, [ENTRY])
    lock = path.with_name("tuned.json.lock")
    assert not lock.exists(), "let go"
    lock.touch()
    with pytest.raises(OptionError, match=r"got a lock that is held. Remove the file if no other"):
        cache.merge(path, DEVICE, [entry(32)])
    lock.unlink()
    cache.merge(path, DEVICE, [entry(32)])
    assert len(cache.read(path, DEVICE)) == 2
