"""Which calls are tuned, one after the other, and the file that keeps what was found."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from attnspan.errors import OptionError
from attnspan.kernels.tuned import Key, header, mask_kind, read
from attnspan.tools.bench.timing import Meter
from attnspan.tools.tune import run as tuning
from attnspan.tools.tune.cases import Case, grid
from attnspan.tools.tune.run import other_seconds, run, save

DEVICE = "a fake machine"
CASES = grid("float32", "64", "64,128,256,512", "half", "forward")


@dataclass(frozen=True)
class Config:
    block: int = 0


class FakeBackend:
    """Calls of 10 ms on a simulated clock; block 2 takes 5 ms, block 3 is illegal, float16 cannot run."""

    name, isa, device = "fake", "any", DEVICE

    def __init__(self) -> None:
        self.now = 0.0
        self.opened: list[int] = []
        self.interrupt_at = 0
        self.candidates = 4

    def open(self, case: Case) -> dict[str, Any]:
        if case.dtype == "float16":
            raise ValueError("it takes no float16")
        if case.k_len == self.interrupt_at:
            raise KeyboardInterrupt
        self.opened.append(case.k_len)
        configs = [Config(block) for block in range(self.candidates)]
        return {"make_call": self._make_call, "configs": configs, "default": Config()}

    def _make_call(self, config: Config) -> Callable[[], None]:
        if config.block == 3:
            raise ValueError("block 3 is illegal")

        def call() -> None:
            self.now += 0.005 if config.block == 2 else 0.01

        return call

    def run(self, cases: list[Case], path: Path | None = None, minutes: float = 1.0) -> list[dict[str, Any]]:
        meter = Meter(clock=lambda: self.now, cpu_clock=lambda: self.now)
        return list(run(self, cases, path, seconds=1.0, minutes=minutes, meter=meter))


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "other_seconds", lambda: 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tuned.json"


def test_every_case_is_searched_and_kept_with_its_evidence(path: Path) -> None:
    found = FakeBackend().run(CASES, path)
    assert json.loads(json.dumps(found)) == read(path, DEVICE)
    for entry, case in zip(found, CASES, strict=True):
        assert Key(**entry["key"]) == case.key("fake", "any")
        assert entry["config"] == {"block": 2}
        assert entry["failures"] == (({"block": 3}, "ValueError: block 3 is illegal"),)
        assert entry["call"] == asdict(case) | {"heads": 8}
        assert entry["ratio"]["median"] == pytest.approx(2)
        assert len(entry["default_seconds"]) == entry["ratio"]["pairs"]


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(FakeBackend().run(CASES)) == 4
    assert not list(tmp_path.iterdir())


def test_what_cannot_run_is_named_and_not_kept(path: Path) -> None:
    bad, good = FakeBackend().run(grid("float16,float32", "64", "64", "half", "forward"), path)
    assert bad["reason"] == "cannot run: it takes no float16"
    assert [entry["key"] for entry in read(path, DEVICE)] == [good["key"]]


def test_what_was_found_next_to_busy_processes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(tuning, "other_seconds", lambda: 0.7 * backend.now)
    (entry,) = backend.run(CASES[:1])
    assert (entry["config"], entry["contender"]) == ({"block": 0}, {"block": 2})
    assert entry["reason"] == "not used: other processes kept 0.7 processors busy"


def test_time_of_this_process_and_idle_time_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_seconds() >= 0
    # user nice system idle iowait irq softirq steal guest, in ticks
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu  500 10 30 9999 888 1 2 7 0 0\ncpu0 ...")
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    assert other_seconds() == pytest.approx(550 / os.sysconf("SC_CLK_TCK") - 1.5)


def test_time_and_interrupts_end_a_run_and_the_next_one_continues(path: Path) -> None:
    backend = FakeBackend()
    backend.candidates = 2000
    found = backend.run(CASES, path, minutes=0.8 / 60)
    assert backend.now < 0.8 + 0.2, "the last case has what time is left"
    assert 2 <= len(found) < 4
    backend.opened.clear()
    backend.interrupt_at = 512
    with pytest.raises(KeyboardInterrupt):
        backend.run(CASES, path)
    assert [entry["call"]["k_len"] for entry in read(path, DEVICE)] == [64, 128, 256]
    backend.interrupt_at = 0
    backend.opened.clear()
    backend.run(CASES, path, minutes=0.5 / 60)
    assert backend.opened[0] == 512, "the case without an entry comes first"
    assert len(read(path, DEVICE)) == 4


def entry(head_dim: int, reason: str = "faster") -> dict[str, Any]:
    key = Key("cpu", "forward", "avx2", "float32", head_dim, 10, "half")
    return {"key": asdict(key), "config": {"block_q": 96}, "reason": reason}


def test_an_entry_replaces_that_of_its_key(path: Path) -> None:
    save(path, DEVICE, entry(32), entry(64))
    save(path, DEVICE, entry(32, "newer"))
    assert read(path, DEVICE) == [entry(64), entry(32, "newer")]


@pytest.mark.parametrize(
    "damage", [b"", b'{"schema": 2', json.dumps(header("another") | {"entries": []}).encode()]
)
def test_a_file_that_cannot_be_used_is_replaced(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "attnspan"):
        save(path, DEVICE, entry(32))
    assert str(path) in caplog.text
    assert read(path, DEVICE) == [entry(32)]


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, DEVICE, entry(32))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OptionError, match="expected a writable file, got No space left on device"):
        save(path, DEVICE, entry(64))
    assert read(path, DEVICE) == [entry(32)]


def test_a_file_that_cannot_be_written_is_named_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = FakeBackend()
    with pytest.raises(OptionError, match=r"expected a writable file.* Set ATTNSPAN_TUNE_CACHE"):
        backend.run(CASES, tmp_path / "file" / "tuned.json")
    assert not backend.opened


def write_often(path: Path, first: int) -> None:
    for head_dim in range(first, first + 20):
        save(path, DEVICE, entry(head_dim))


def test_readers_and_concurrent_writers_see_whole_files(path: Path) -> None:
    save(path, DEVICE, entry(1))
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_often, args=(path, first)) for first in (100, 200)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        value = json.loads(path.read_bytes())
        assert value["entries"]
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("length", [64, 512, 1000, 8192])
@pytest.mark.parametrize("kind", ["dense", "half", "sparse", "decode"])
def test_a_mask_is_of_its_kind(kind: str, length: int) -> None:
    (case,) = grid("float32", "64", str(length), kind, "forward")
    pairs = int(case.mask.spans(case.q_len, case.k_len).cost().sum())
    assert mask_kind(case.q_len, case.k_len, pairs) == kind
    assert case.q_len == (1 if kind == "decode" else length)


def test_the_grid_has_each_key_once_and_short_calls_first() -> None:
    cases = grid("float32", "64", "1024, 900, 64", "dense,half", "forward,backward")
    assert [case.k_len for case in cases] == [64] * 4 + [1024] * 4
    assert len({case.key("cpu", "avx2") for case in cases}) == 8


def test_long_calls_have_fewer_heads() -> None:
    heads = [case.heads for case in grid("float32", "64", "512,4096,16384", "dense", "forward")]
    assert heads == [8, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "512,many"}, "--lengths: expected numbers from 17 on, got '512,many'. Separate them by"),
        ({"lengths": "16"}, "--lengths: expected numbers from 17 on, got '16'"),
        ({"head_dims": ""}, "--head-dims: expected numbers from 1 on, got ''"),
        ({"dtypes": "float32,"}, "--dtypes: expected some of float32, bfloat16, float16, got 'float32,'"),
        ({"modes": "sideways"}, "--modes: expected some of forward, backward"),
        ({"masks": "dense,wide"}, "--masks: expected some of dense, half, sparse, decode"),
    ],
)
def test_options_that_cannot_be_read_are_named(options: dict[str, str], message: str) -> None:
    given = {"dtypes": "float32", "head_dims": "64", "lengths": "64", "masks": "half", "modes": "forward"}
    with pytest.raises(OptionError, match=message):
        grid(**given | options)
