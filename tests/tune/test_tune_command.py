"""The command, with a back end of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget

from attnspan.bench.results import Results
from attnspan.errors import OptionError
from attnspan.tune import cache, run
from attnspan.tune.command import execute
from attnspan.tune.options import Options

SMALL: dict[str, Any] = {"dtypes": "float32", "head_dims": "64", "lengths": "64,128", "modes": "forward"}
SMALL |= {"masks": "half", "seconds": 1.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.json"


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """The target's clock, and neighbours that it makes up, instead of the machine's."""
    target, real = FakeTarget(), run.tune

    def tune(*args: Any, **options: Any) -> run.Outcome:
        return real(*args, **options, meter=target.meter, watch=target.watch)

    monkeypatch.setattr(run, "tune", tune)
    return target


def no_page(results: Results, path: Path) -> None:
    raise AssertionError("no page was asked for")


def test_it_says_what_was_gained_and_where_it_is(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    printed = capsys.readouterr().out
    assert "2 kinds of calls on a fake machine, 12 min at most" in printed
    assert "fake forward any float32 D=64 S<=64 half: 2.00x [2.00, 2.00] with block=2" in printed
    assert "2 of 2 kinds of calls gained; 6 candidates, 2 failed" in printed
    assert f"written to {path}; used where ATTNSPAN_TUNE_CACHE={path}" in printed
    assert [entry.config for entry in cache.read(path, "a fake machine")] == [{"block": 2}] * 2
    execute(Options(show=True, cache=path), no_page, made_up_time)
    printed = capsys.readouterr().out
    assert "tuned for a fake machine" in printed
    assert printed.count("block=2") == 2


def test_a_dry_run_writes_nothing(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(Options(**SMALL, cache=path, dry_run=True), no_page, made_up_time)
    assert "2 of 2 kinds of calls gained" in capsys.readouterr().out
    assert not list(path.parent.iterdir())


def test_clear_and_show_of_nothing(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(Options(show=True, cache=path), no_page, made_up_time)
    assert "nothing tuned for a fake machine" in capsys.readouterr().out
    execute(Options(clear=True, cache=path), no_page, made_up_time)
    assert "there was none" in capsys.readouterr().out
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    execute(Options(clear=True, cache=path), no_page, made_up_time)
    assert f"{path}: removed" in capsys.readouterr().out
    assert not path.exists()


def test_the_next_run_goes_on_with_what_is_left(path: Path, made_up_time: FakeTarget) -> None:
    execute(Options(**SMALL | {"lengths": "64"}, cache=path), no_page, made_up_time)
    made_up_time.opened.clear()
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    assert [case.k_len for case in made_up_time.opened] == [128, 64]


def test_an_interrupt_leaves_what_was_found_in_the_cache(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_time.interrupt_at = Options(**SMALL).cases()[1]
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    assert "interrupted: 1 kind of calls left for the next run" in capsys.readouterr().out
    assert len(cache.read(path, "a fake machine")) == 1


def test_a_damaged_cache_is_put_aside_and_named(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("damage")
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    assert f"the cache could not be used and is now {path}.bad" in capsys.readouterr().out
    assert len(cache.read(path, "a fake machine")) == 2
    path.write_text("damage")
    with pytest.raises(OptionError, match="expected a tuning cache of this machine"):
        execute(Options(show=True, cache=path), no_page, made_up_time)


def test_what_cannot_be_run_is_listed_with_its_reason(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(Options(**SMALL | {"dtypes": "float16"}, cache=path), no_page, made_up_time)
    printed = capsys.readouterr().out
    assert printed.count("it takes no float16") == 2
    assert "written" not in printed


def test_neighbours_are_named(
    path: Path, made_up_time: FakeTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up_time.others = 1.0
    execute(Options(**SMALL, cache=path), no_page, made_up_time)
    assert "tune again on a quiet machine" in capsys.readouterr().out


def test_gains_are_written_for_other_readers(path: Path, made_up_time: FakeTarget) -> None:
    pages = []
    options = Options(
        **SMALL, cache=path, json=path.with_name("gains.json"), html=path.with_name("page.html")
    )
    execute(options, lambda results, file: pages.append((results, file)), made_up_time)
    assert options.json is not None
    results = Results.load(options.json)
    assert [gain.config for gain in results.tuning] == [{"block": 2}, {"block": 2}]
    assert results.environment["device_name"] == "a fake machine"
    assert [(page.tuning, file) for page, file in pages] == [(results.tuning, options.html)]


def test_without_a_place_it_says_so_before_it_searches(
    made_up_time: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "off")
    with pytest.raises(OptionError, match="got none, as ATTNSPAN_TUNE_CACHE is off"):
        execute(Options(**SMALL), no_page, made_up_time)
    assert not made_up_time.opened
