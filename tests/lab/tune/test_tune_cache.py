"""What a search found is kept, by name, machine and versions, and harmless whatever the file holds."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.bench.timing import Meter
from attnspan_lab.cli import build_app
from attnspan_lab.tune import cache
from attnspan_lab.tune.cache import cache_path, entries, tuned


class Fake:
    """Calls of 10 ms on a simulated clock; configuration 2 takes 5 ms, configuration 3 is illegal."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, 0

    def make_call(self, config: int) -> Callable[[], None]:
        self.made += 1
        if config == 3:
            raise ValueError("3 is illegal")

        def call() -> None:
            self.now += 0.005 if config == 2 else 0.01

        return call

    def tuned(self, path: Path | None, name: str = "fake", configs: Any = (1, 2, 3), **more: Any) -> Any:
        meter = Meter(clock=lambda: self.now, cpu_clock=lambda: self.now)
        return tuned(name, self.make_call, configs, 0, seconds=1.0, meter=meter, path=path, **more)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_other_seconds", lambda: 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "tuned.json"


def test_a_search_is_kept_with_its_evidence_and_not_repeated(path: Path) -> None:
    found = Fake().tuned(path)
    assert (found.config, found.reason) == (2, "faster")
    (entry,) = entries(path)
    assert entry["found"]["failures"] == [["3", "ValueError: 3 is illegal"]]
    assert len(entry["found"]["default_seconds"]) == entry["found"]["ratio"]["pairs"]
    again = Fake()
    found = again.tuned(path)
    assert (found.config, found.reason, again.made) == (2, "remembered: faster", 0)


def test_another_name_version_machine_or_space_is_searched_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake().tuned(path)
    assert Fake().tuned(path, "other").reason == "faster"
    assert Fake().tuned(path, configs=(1, 3)).config == 0, "2 is no candidate any more"
    assert Fake().tuned(path, packages=["pytest"]).reason == "faster"
    monkeypatch.setattr(cache, "_machine", lambda: "another")
    assert Fake().tuned(path).reason == "faster"
    assert len(entries(path)) == 4


def test_what_was_found_next_to_busy_processes_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_other_seconds", lambda: 0.7 * time.monotonic())
    found = Fake().tuned(path)
    assert (found.config, found.contender) == (0, 2)
    assert found.reason == "the default, because other processes kept 0.7 processors busy"
    assert entries(path) == []


@pytest.mark.parametrize("damage", [b"", b'{"schema": 2', b'{"schema": 2, "entries": []}', b'{"schema": 3}'])
def test_a_file_that_cannot_be_used_is_replaced(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "attnspan"):
        assert Fake().tuned(path).reason == "faster"
    assert str(path) in caplog.text
    assert json.loads(path.read_bytes())["schema"] == 3


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"expected a writable file.* Set ATTNSPAN_TUNE_CACHE"):
        Fake().tuned(tmp_path / "file" / "tuned.json")


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    assert cache_path() == tmp_path / "tuned.json"
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    assert cache_path() is None
    monkeypatch.delenv("ATTNSPAN_TUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "attnspan" / "tuned.json"


def test_time_of_this_process_and_idle_time_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cache._other_seconds() >= 0
    # user nice system idle iowait irq softirq steal guest, in ticks
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu  500 10 30 9999 888 1 2 7 0 0\ncpu0 ...")
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    assert cache._other_seconds() == pytest.approx(550 / os.sysconf("SC_CLK_TCK") - 1.5)


def test_the_command_tunes_any_callable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    Path("mine.py").write_text(
        "import time\n"
        "def call(ms): return lambda: time.sleep(ms / 1e3)\n"
        "def search(): return {'make_call': call, 'configs': [2], 'default': 9}\n"
        "def junk(): return 3\n"
    )
    made = CliRunner().invoke(build_app(), ["tune", "mine:search", "--seconds", "0.5"])
    assert "mine:search: 2, " in made.output
    assert "speedup" in made.output
    assert "mine:search: 2, faster" in CliRunner().invoke(build_app(), ["tune", "--show"]).output
    made = CliRunner().invoke(build_app(), ["tune", "mine:junk"])
    assert "expected a dict with make_call, configs and default, got int" in str(made.exception)
