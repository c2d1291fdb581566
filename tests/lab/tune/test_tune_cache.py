"""What a search found is kept, by name, machine and versions, and harmless whatever the file holds."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest
from fake_devices import World

from attnspan.errors import OptionError
from attnspan_lab.tune import cache
from attnspan_lab.tune.cache import cache_path, entries, tuned


def tune(path, name="fake", configs=(1, 2, 3), **more):
    """Calls of 10 ms on a simulated clock; configuration 2 takes 5 ms, configuration 3 is illegal."""
    world = World()

    def make_call(config):
        if config == 3:
            raise ValueError("3 is illegal")
        return world.subject(config, [0.005 if config == 2 else 0.01]).call

    return tuned(name, make_call, configs, 0, seconds=1.0, meter=world.meter(), path=path, **more)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    monkeypatch.setattr(cache, "_other_seconds", lambda: 0.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "tuned.json"


def test_a_search_is_kept_with_its_evidence_and_not_repeated(path, monkeypatch):
    found = tune(path)
    assert (found.config, found.reason) == (2, "faster")
    (entry,) = entries(path)
    assert entry["found"]["failures"] == [["3", "ValueError: 3 is illegal"]]
    assert len(entry["found"]["default_seconds"]) == entry["found"]["ratio"]["pairs"]
    with monkeypatch.context() as patched:
        patched.setattr(cache, "search", lambda *_, **__: pytest.fail("it searched again"))
        found = tune(path)
    assert (found.config, found.reason) == (2, "remembered: faster")
    # Another name, version, machine or space is searched anew.
    assert tune(path, "other").reason == "faster"
    assert tune(path, configs=(1, 3)).config == 0, "2 is no candidate any more"
    assert tune(path, packages=["pytest"]).reason == "faster"
    monkeypatch.setattr(cache, "_machine", lambda: "another")
    assert tune(path).reason == "faster"
    assert len(entries(path)) == 4


def test_what_was_found_next_to_busy_processes_is_not_used(path, monkeypatch):
    monkeypatch.setattr(cache, "_other_seconds", lambda: 0.7 * time.monotonic())
    found = tune(path)
    assert (found.config, found.contender) == (0, 2)
    assert found.reason == "the default, because other processes kept 0.7 processors busy"
    assert entries(path) == []


@pytest.mark.parametrize("damage", [b"", b'{"schema": 2', b'{"schema": 2, "entries": []}', b'{"schema": 3}'])
def test_a_file_that_cannot_be_used_is_replaced(path, damage, caplog):
    path.parent.mkdir()
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "attnspan"):
        assert tune(path).reason == "faster"
    assert str(path) in caplog.text
    assert json.loads(path.read_bytes())["schema"] == 3


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    assert cache_path() == tmp_path / "tuned.json"
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    assert cache_path() is None
    monkeypatch.delenv("ATTNSPAN_TUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "attnspan" / "tuned.json"
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"expected a writable file.* Set ATTNSPAN_TUNE_CACHE"):
        tune(tmp_path / "file" / "tuned.json")


def test_time_of_this_process_and_idle_time_do_not_count(monkeypatch):
    monkeypatch.undo()
    assert cache._other_seconds() >= 0
    # user nice system idle iowait irq softirq steal guest, in ticks
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu  500 10 30 9999 888 1 2 7 0 0\ncpu0 ...")
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    assert cache._other_seconds() == pytest.approx(550 / os.sysconf("SC_CLK_TCK") - 1.5)


MINE = """
import time
def search(): return {'make_call': lambda ms: lambda: time.sleep(ms / 1e3), 'configs': [2], 'default': 9}
def junk(): return 3
"""


@pytest.mark.slow
def test_the_command_tunes_any_callable(tmp_path, monkeypatch, attnspan):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    Path("mine.py").write_text(MINE)
    _, out, _ = attnspan("tune", "mine:search", "--seconds", "0.5")
    assert "mine:search: 2, " in out
    assert "speedup" in out
    assert "mine:search: 2, faster" in attnspan("tune", "--show")[1]
    code, _, err = attnspan("tune", "mine:junk")
    assert (code, "expected a dict with make_call, configs and default, got int" in err) == (2, True)
