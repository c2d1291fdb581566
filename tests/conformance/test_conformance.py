"""Option x mask x dtype x backend, forward and every gradient, against the oracle in float64."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conformance_backends import BACKENDS
from covering import covering, everything
from samples.conformance import OPTIONS, SHAPES, SMALL
from samples.parts import MASKS, Case
from samples.problems import DTYPES, check, make, oracle

from attnspan.errors import BackendError

Names = tuple[str, str, str, str]


def _cells(rows: Iterable[str], share: int) -> list[Names]:
    """Option, mask or shape, dtype, backend: backends last, so that they share what the oracle computed."""
    rows = list(rows)
    cells = set(_cheap(rows, share)) if not everything() else set()
    for name, backend in BACKENDS.items():
        if everything():
            whole = list(product(OPTIONS, rows, backend.dtypes, [name]))
            cells |= {whole[i] for i in covering([cell[:3] for cell in whole], backend.long[share])}
        if backend.programs:
            cells |= set(_programs(name, rows, share))
    return sorted(cells, key=lambda cell: (cell[:3], list(BACKENDS).index(cell[3])))


def _cheap(rows: Sequence[str], share: int) -> list[Names]:
    """Where a call is cheap: pairs of everything, but every third pair of an option and a shape."""
    names, every = [name for name, backend in BACKENDS.items() if not backend.programs], (1, 3)[share]
    options = {option: i for i, option in enumerate(OPTIONS)}
    whole = product(OPTIONS, rows, DTYPES, names)
    cells = [cell for cell in whole if (options[cell[0]] + rows.index(cell[1])) % every == 0]
    return [cells[i] for i in covering(cells)]


def _programs(name: str, rows: Sequence[str], share: int) -> list[Names]:
    """Where each option is a program: every mask under one, the others under one mask each, some shapes."""
    backend = BACKENDS[name]
    if share == 0:
        wanted = [(option, rows[i]) for i, option in enumerate(backend.programs, start=1)]
        widest = [(backend.widest, row, backend.dtypes[0], name) for row in rows]
    else:
        some = rows[:: len(rows) // backend.shapes] if backend.shapes else []
        wanted, widest = list(zip(("none", "dense") * backend.shapes, some, strict=False)), []
    dtypes = backend.dtypes
    return widest + [(*cell, dtypes[(i + 1) % len(dtypes)], name) for i, cell in enumerate(wanted)]


def _check(option: str, case: Case, dtype: str, name: str) -> None:
    backend, case = BACKENDS[name], replace(case, options=OPTIONS[option], dtype=DTYPES[dtype])
    if backend.missing:
        pytest.skip(f"{name}: {backend.missing}")
    problem = make(case)
    if option in backend.unsupported:
        with backend.within(), pytest.raises(BackendError, match=backend.unsupported[option]):
            backend.run(problem)
        return
    with backend.within():
        got = backend.run(problem)
    assert got.keys() == {"out", "lse", "dq", "dk", "dv", *(f"d{x}" for x in problem.setting.parameters)}
    nothing = np.isneginf(oracle(case)[0]["lse"])
    assert not got["out"][nothing].any()
    assert not got["dq"][nothing].any()
    check(case, got)
    backend.ran[option] += 1


@pytest.mark.slow
@pytest.mark.parametrize(("option", "mask", "dtype", "backend"), _cells(MASKS, 0))
def test_option_under_mask(option: str, mask: str, dtype: str, backend: str) -> None:
    _check(option, replace(SMALL, mask=mask), dtype, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "shape", "dtype", "backend"), _cells(SHAPES, 1))
def test_option_in_shape(option: str, shape: str, dtype: str, backend: str) -> None:
    _check(option, SHAPES[shape], dtype, backend)
