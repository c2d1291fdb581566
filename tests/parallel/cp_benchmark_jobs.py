"""What ranks run of benchmarks/context_parallel.py: its checks and its rounds, at a small size."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from worlds import mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _cp_ranks
from _cp_ranks import Settings, run

OURS = ("exchange", "ring, zigzag", "ulysses", "auto", "all-gather + our kernel", "zigzag ring, ATen flash")
SMALL: dict[str, Any] = {
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
}


def call(given: dict[str, Any]) -> dict[str, Any]:
    """What a run with these settings finds; contestants that compile for seconds are left out."""
    settings = Settings(**{**SMALL, **given})
    return run(settings, mesh(settings.ranks))


def spoiled(name: str, how: str, may_fail: bool, only: tuple[str, ...]) -> Any:
    """A run in which one contestant raises, or mistakes whose rows it has: what it finds, or its error."""
    known = _cp_ranks.contestants

    def contestants(ranks: int, machine: Any) -> list[Any]:
        found = known(ranks, machine)
        for each in found:
            if each.name == name:  # They may be frozen.
                object.__setattr__(each, "prepare", _spoil(each.prepare, how))
                object.__setattr__(each, "may_fail", may_fail)
        return found

    with patch.object(_cp_ranks, "contestants", contestants):
        try:
            return call({"only": only})
        except AssertionError as error:
            return str(error)


def _spoil(prepare: Any, how: str) -> Any:
    def prepared(*given: Any) -> Any:
        if how == "raises":
            try:
                raise NotImplementedError("no backward\n on this device")
            except NotImplementedError as error:
                raise RuntimeError("compilation failed") from error
        ready = prepare(*given)
        return type(ready)(ready.call, ready.rows.roll(1), ready.about)

    return prepared
