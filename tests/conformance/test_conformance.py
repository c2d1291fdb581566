"""Option x mask x dtype x backend, forward and every gradient, against the oracle in float64."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import numpy as np
import pytest
import torch
from closeness import check
from conformance_backends import BACKENDS, WIDEST
from conformance_cases import DTYPES, OPTIONS, SHAPES, Cell, Shape, make, oracle
from conformance_masks import MASKS
from covering import covering, everything

from attnspan.errors import BackendError

# Sums are in float32, and so is the exponential: in bf16 it is cut to what that needs (csrc/softmax.h).
EXPONENTIAL = {torch.float32: 6.5e-8, torch.bfloat16: 3.3e-6, torch.float16: 6.5e-8}

# In the ordinary run a back end that compiles meets each shape with one of these.
OPTION_OF_SHAPE = ("none", "everything, indices given", "dense", "alibi")
PAIRS = list(combinations(range(4), 2))


def _check(cell: Cell, name: str) -> None:
    backend = BACKENDS[name]
    if backend.missing:
        pytest.skip(f"{name}: {backend.missing}")
    problem = make(cell)
    if cell.option in backend.unsupported:
        with backend.within(), pytest.raises(BackendError, match=backend.unsupported[cell.option]):
            backend.run(problem)
        return
    exact, unavoidable = oracle(cell)
    with backend.within():
        got = backend.run(problem)
    nothing = np.isneginf(exact["lse"])
    assert not got["out"][nothing].any()
    assert not got["dq"][nothing].any()
    check(got, exact, unavoidable, cell.shape, EXPONENTIAL[cell.dtype])
    backend.ran[cell.option] += 1


Names = tuple[str, str, str, str]


def _whole(rows: Sequence[str], share: str) -> list[Names]:
    """Option, mask or shape, dtype, backend: backends last, so that they share what the oracle computed."""
    first = 0 if share == "masks" else len(MASKS)
    return [
        (option, row, dtype, name)
        for i, option in enumerate(OPTIONS)
        for j, row in enumerate(rows)
        for dtype in DTYPES
        for name, backend in BACKENDS.items()
        if backend.takes(getattr(backend, share), i, j, dtype, first)
    ]


def _ordinary(rows: Sequence[str], share: str) -> list[Names]:
    """The cells of the ordinary run.

    Where a call is cheap: pairs of everything, but every third pair of an option and a shape. Where each
    option is a program to compile: every mask under one program, then the options that hold all others, then
    shapes, one cell each.
    """
    quick = [cell for cell in _whole(rows, share) if not BACKENDS[cell[3]].programs]
    if share == "shapes":
        options = list(OPTIONS)
        quick = [cell for cell in quick if (options.index(cell[0]) + rows.index(cell[1])) % 3 == 0]
    cells = {quick[i] for i in covering(quick)}
    for name, backend in BACKENDS.items():
        if share == "masks":
            wanted = [(WIDEST, row) for row in rows] if backend.programs else []
            wanted += [(option, rows[i]) for i, option in enumerate(backend.programs, start=1)]
        else:
            wanted = [(OPTION_OF_SHAPE[j % len(OPTION_OF_SHAPE)], row) for j, row in enumerate(rows)]
            every = len(rows) // backend.few_shapes if backend.few_shapes else len(rows)
            wanted = wanted[::every][: backend.few_shapes] if backend.programs else []
        for i, (option, row) in enumerate(wanted):
            number = 0 if option == WIDEST else i + 1 - len(rows)
            cells.add((option, row, backend.dtypes[number % len(backend.dtypes)], name))
    return sorted(cells, key=lambda cell: (cell[:3], list(BACKENDS).index(cell[3])))


def _cells(rows: Iterable[str], share: str) -> list[Names]:
    rows = list(rows)
    ordinary = _ordinary(rows, share)
    return list(dict.fromkeys(_whole(rows, share) + ordinary)) if everything() else ordinary


@pytest.mark.parametrize(("option", "mask", "dtype", "backend"), _cells(MASKS, "masks"))
def test_option_under_mask(option: str, mask: str, dtype: str, backend: str) -> None:
    _check(Cell(option, mask, Shape(), DTYPES[dtype]), backend)


@pytest.mark.parametrize(("option", "shape", "dtype", "backend"), _cells(SHAPES, "shapes"))
def test_option_in_shape(option: str, shape: str, dtype: str, backend: str) -> None:
    _check(Cell(option, "random", SHAPES[shape], DTYPES[dtype]), backend)


@pytest.mark.parametrize(("rows", "share"), [(MASKS, "masks"), (SHAPES, "shapes")])
def test_a_share_of_the_cells_has_what_it_says(rows: dict[str, object], share: str) -> None:
    cells = _whole(list(rows), share)
    for name, backend in BACKENDS.items():
        own, kind = [cell[:3] for cell in cells if cell[3] == name], getattr(backend, share)
        assert len(own) == len(set(own))
        whole = set(product(OPTIONS, rows, backend.dtypes))
        if kind == "all":
            assert set(own) == whole
        if kind == "pairs":
            assert len(own) == len(OPTIONS) * len(rows)
            assert {cell[:2] for cell in own} == {cell[:2] for cell in whole}
            assert {cell[1:] for cell in own} == {cell[1:] for cell in whole}
        for i in (1, 2):
            assert {cell[i] for cell in own} == {cell[i] for cell in whole}


def test_the_ordinary_run_has_every_pair_or_every_mask_and_part() -> None:
    cells, whole = _ordinary(list(MASKS), "masks"), _whole(list(MASKS), "masks")
    for name, backend in BACKENDS.items():
        own = [cell for cell in cells if cell[3] == name]
        assert {cell[1] for cell in own} == set(MASKS)
        assert {cell[2] for cell in own} == set(backend.dtypes)
        if backend.programs:
            assert {cell[0] for cell in own} == {WIDEST, *backend.programs}
        else:
            assert {cell[0] for cell in own} == set(OPTIONS)
    pairs = [
        {(i, j, cell[i], cell[j]) for cell in some if not BACKENDS[cell[3]].programs for i, j in PAIRS}
        for some in (cells, whole)
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_meets_every_option(name: str) -> None:
    cells = [*_whole(list(MASKS), "masks"), *_whole(list(SHAPES), "shapes")]
    assert {cell[0] for cell in cells if cell[3] == name} == set(OPTIONS)
