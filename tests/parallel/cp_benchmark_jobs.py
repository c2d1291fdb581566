"""What ranks run of benchmarks/context_parallel.py: its checks and its rounds, at a small size."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worlds import mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _cp_ranks
from _cp_ranks import Settings, run


def small(**given: Any) -> dict[str, Any]:
    """What a run with these settings finds; contestants that compile for seconds are left out."""
    settings = Settings(
        **{
            "q_len": 128,
            "rounds": 2,
            "ranks": 2,
            "cases": ("causal",),
            "dtypes": ("float32",),
            "heads": ((4, 2),),
            "head_dims": (16,),
            "modes": ("forward+backward",),
            "only": OURS,
            "calibrate": 0.0,
            **given,
        }
    )
    return run(settings, mesh(settings.ranks))


def call(given: dict[str, Any]) -> dict[str, Any]:
    """`small`, of settings as a mapping."""
    return small(**given)


OURS = ("exchange", "ring, zigzag", "ulysses", "auto", "all-gather + our kernel", "zigzag ring, ATen flash")


def misplaced(name: str) -> str:
    """The error of a run in which one contestant mistakes whose rows it has."""
    try:
        with _changed(name, _with_turned_rows):
            small(only=(name,))
    except AssertionError as error:
        return str(error)
    return "nothing noticed"


def of_another_library(how: str) -> dict[str, Any]:
    """A run in which a contestant that may fail does: in words that another error wraps, or by its result."""
    name = "all-gather + our kernel"
    with _changed(name, {"raises": _raising, "is wrong": _with_turned_rows}[how], may_fail=True):
        return small(only=(name, "exchange"))


@contextmanager
def _changed(name: str, change: Any, may_fail: bool = False) -> Iterator[None]:
    known = _cp_ranks.contestants

    def contestants(ranks: int, machine: Any) -> list[Any]:
        found = known(ranks, machine)
        for each in found:
            if each.name == name:
                # They may be frozen.
                object.__setattr__(each, "prepare", change(each.prepare))
                object.__setattr__(each, "may_fail", may_fail)
        return found

    _cp_ranks.contestants = contestants
    try:
        yield
    finally:
        _cp_ranks.contestants = known


def _with_turned_rows(prepare: Any) -> Any:
    def prepare_turned(*given: Any) -> Any:
        ready = prepare(*given)
        return type(ready)(ready.call, ready.rows.roll(1), ready.about)

    return prepare_turned


def _raising(prepare: Any) -> Any:
    def raise_in_two_layers(*given: Any) -> Any:
        try:
            raise NotImplementedError("no backward\n on this device")
        except NotImplementedError as error:
            raise RuntimeError("compilation failed") from error

    return raise_in_two_layers
