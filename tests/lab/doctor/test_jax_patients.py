"""Every sick function in JAX is diagnosed: first comes the planted finding, on its line. Twins have none."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

import jax
import jax_patients as patients

from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.jax import STAGES

SICK = sorted(patients.KINDS)
WELL = sorted(name for name in dir(patients) if name.startswith("well_"))
MESHES = {x for x in SICK if patients.KINDS[x].startswith("rank-")} | {"well_sharded", "well_mapped"}
STAGE_OF = {"recompile": "compiled", "compile-error": "compiled", "constant": "compiled", "parity": "parity"}
STAGE_OF |= dict.fromkeys(("rank-rows", "rank-gather", "rank-replicated"), "ranks")


def examined(name: str, *stages: str) -> tuple[Finding, ...]:
    found: list[Finding] = []

    def say(**what: object) -> None:
        if isinstance(x := what.get("finding"), Finding):
            found.append(x)

    for stage in stages:
        STAGES[stage](getattr(patients, name)(), say, "")
    return merged(found)


def planted(name: str) -> list[int]:
    """Numbers of the lines that are marked for a patient."""
    lines = Path(patients.__file__).read_text().splitlines()
    own = [i for i, line in enumerate(lines, 1) if line.endswith(f"# sick: {name}")]
    source, first = inspect.getsourcelines(getattr(patients, name))
    return own or [first + i for i, line in enumerate(source) if line.rstrip().endswith("# sick")]
