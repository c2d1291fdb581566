"""What ranks run of benchmarks/context_parallel.py: its checks and its rounds, at a small size."""

import sys
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
    known = _cp_ranks.contestants

    def contestants(ranks: int, machine: Any) -> list[Any]:
        found = known(ranks, machine)
        for each in found:
            if each.name == name:
                object.__setattr__(each, "prepare", _turned(each.prepare))
        return found

    _cp_ranks.contestants = contestants
    try:
        small(only=(name,))
    except AssertionError as error:
        return str(error)
    finally:
        _cp_ranks.contestants = known
    return "nothing noticed"


def _turned(prepare: Any) -> Any:
    def prepare_turned(*given: Any) -> Any:
        ready = prepare(*given)
        return type(ready)(ready.call, ready.rows.roll(1), ready.about)

    return prepare_turned
