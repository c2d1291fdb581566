"""Stages that run at the same time: which ones, with which results, and how they end."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attnspan_lab.children import Child, Loaded
from attnspan_lab.doctor import Diagnosis, diagnose, run
from attnspan_lab.doctor.process import Stage, run_together

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow]
_ASKED = ["compiled", "parity"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


def examined(cores: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Diagnosis, list[list[str]]]:
    """Examine a model that breaks the graph. Return the diagnosis and the stages that ran together."""
    monkeypatch.setattr(run, "usable_cores", lambda: cores)
    seen: list[list[str]] = []
    found = diagnose("targets:prints", stages=_ASKED, backend="aot_eager", running=seen.append)  # type: ignore[arg-type]
    return found, seen


def test_stages_that_measure_no_time_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, in_a_row), (two, together) = (examined(cores, monkeypatch) for cores in (1, 2))
    assert in_a_row == [["compiled"], [], ["without attention"], [], ["parity"], []]
    assert together[:3] == [["compiled"], [], ["without attention", "parity"]]
    assert two.findings == one.findings
    assert [x.kind for x in two.findings] == ["graph-break"]
    assert "step seconds" in two.facts["compiled"]
    assert "step seconds" not in two.facts["without attention"]
    assert list(two.facts) == list(one.facts) == ["compiled", "without attention", "parity", "stages"]


@pytest.mark.parametrize(
    ("todo", "most", "taken"),
    [
        (["parity", "features", "ranks"], 8, ["parity", "features"]),
        (["parity", "features"], 1, ["parity"]),
        (["eager", "compiled", "parity"], 8, ["eager"]),
        (["parity", "cure"], 8, ["parity"]),
    ],
)
def test_stages_that_measure_time_run_alone(todo: list[str], most: int, taken: list[str]) -> None:
    left = [x for x in todo if x not in taken]
    assert run._together(todo, most) == taken
    assert todo == left


def is_running(pid: int) -> bool:
    """Whether a process runs. It may still wait for its parent to read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ids(children: list[Child]) -> list[int]:
    """The ids of all processes, as soon as they run."""
    while any(x._process.pid is None for x in children):
        time.sleep(0.01)
    return [pid for x in children if (pid := x._process.pid) is not None]


def test_ctrl_c_ends_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started, pids = list[Child](), list[int]()
    fork = Loaded.fork

    def forked(self: Loaded, *given: Any) -> Child:
        started.extend([self, fork(self, *given)])
        return started[-1]

    def interrupted(names: Any) -> None:
        if len(names) == 2:
            pids.extend(ids(started[-3:]))
            assert all(map(is_running, pids))
            raise KeyboardInterrupt

    monkeypatch.setattr(Loaded, "fork", forked)
    monkeypatch.setattr(run, "usable_cores", lambda: 2)
    found = diagnose("targets:prints", stages=_ASKED, backend="aot_eager", running=interrupted)
    assert not found.complete
    assert [x.kind for x in found.findings] == ["graph-break"]
    assert found.facts["stages"]["unchecked"]["compiled results"] == "its stage did not end"
    assert len(set(pids)) == 3
    assert not any(map(is_running, pids))


def test_a_time_limit_ends_only_its_own_stage() -> None:
    given: dict[str, Any] = {"arguments": (), "stage": "eager", "backend": "", "seen": lambda _: None}
    hangs = Stage("targets:hangs", limit=3.0, **given)
    ends = Stage("targets:healthy", limit=300.0, **given)
    with Loaded("attnspan_lab.doctor.child", {}, {"PYTHONPATH": os.getcwd()}) as loaded:
        run_together([(x, partial(loaded.fork, x.task)) for x in (hangs, ends)])
    assert [x.kind for x in hangs.findings] == ["hang"]
    assert (ends.at, ends.findings) == ("", [])


def test_stages_end_with_a_doctor_that_is_killed() -> None:
    stage = Stage("targets:hangs", (), "eager", "", 300.0, lambda _: None)
    with Loaded("attnspan_lab.doctor.child", {}, {}) as loaded, loaded.fork(stage.task) as child:
        (pid,) = ids([child])
        assert is_running(pid)
        loaded.end()  # It would end by itself, because its parent has another id.
        end = time.monotonic() + 60
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(pid)


def test_a_process_that_cannot_load_is_a_crash() -> None:
    stage = Stage("targets:healthy", (), "eager", "", 300.0, lambda _: None)
    with Loaded("no_such_module", {}, {}) as loaded:
        run_together([(stage, partial(loaded.fork, stage.task))])
    (found,) = stage.findings
    assert found.kind == "crash"
    assert "No module named" in found.what
    assert stage.is_unloaded
