"""Option x mask x dtype x backend, forward and every gradient, against the oracle in float64."""

import math
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from conformance_backends import BACKENDS
from conformance_cases import DTYPES, FEW, OPTIONS, SHAPES, Cell, Shape, error, make, oracle
from conformance_masks import MASKS

from attnspan.errors import BackendError

# Sums are in float32, and so is the exponential: in bf16 it is cut to what that needs (csrc/softmax.h).
EXPONENTIAL = {torch.float32: 6.5e-8, torch.bfloat16: 3.3e-6, torch.float16: 6.5e-8}

# Times the error that no implementation can avoid, which is a root of a mean of squares: of a result of a few
# elements, six sigma.
FACTOR, FACTOR_OF_FEW = 3, 6


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
    assert got.keys() == exact.keys()
    shape = cell.shape
    # Roundings of float32 walk at random over as many terms as a sum has.
    terms = max(shape.k_len, shape.q_len * shape.heads // shape.kv_heads)
    pairs = shape.batch * shape.q_len * shape.k_len
    for result, value in got.items():
        walk = 2**-24 * math.sqrt(terms if result in ("out", "lse", "dq", "dk", "dv") else pairs)
        factor = FACTOR if value.size >= FEW else FACTOR_OF_FEW
        bound = factor * (unavoidable[result] + walk + EXPONENTIAL[cell.dtype])
        found = error(value, exact[result])
        assert found <= bound, f"{result}: error {found:.3g}, allowed {bound:.3g}"
    backend.ran[cell.option] += 1


def _cells(rows: Iterable[str], share: str) -> list[tuple[str, str, str, str]]:
    """Option, mask or shape, dtype, backend: backends last, so that they share what the oracle computed."""
    rows = list(rows)
    first = 0 if share == "masks" else len(MASKS)
    return [
        (option, row, dtype, name)
        for i, option in enumerate(OPTIONS)
        for j, row in enumerate(rows)
        for dtype in DTYPES
        for name, backend in BACKENDS.items()
        if backend.takes(getattr(backend, share), i, j, dtype, first)
    ]


@pytest.mark.parametrize(("option", "mask", "dtype", "backend"), _cells(MASKS, "masks"))
def test_option_under_mask(option: str, mask: str, dtype: str, backend: str) -> None:
    _check(Cell(option, mask, Shape(), DTYPES[dtype]), backend)


@pytest.mark.parametrize(("option", "shape", "dtype", "backend"), _cells(SHAPES, "shapes"))
def test_option_in_shape(option: str, shape: str, dtype: str, backend: str) -> None:
    _check(Cell(option, "random", SHAPES[shape], DTYPES[dtype]), backend)


@pytest.mark.parametrize(("rows", "share"), [(MASKS, "masks"), (SHAPES, "shapes")])
def test_a_share_of_the_cells_has_what_it_says(rows: dict[str, object], share: str) -> None:
    cells = _cells(rows, share)
    for name, backend in BACKENDS.items():
        own, kind = [cell[:3] for cell in cells if cell[3] == name], getattr(backend, share)
        assert len(own) == len(set(own))
        everything = set(product(OPTIONS, rows, backend.dtypes))
        if kind == "all":
            assert set(own) == everything
        if kind == "pairs":
            assert len(own) == len(OPTIONS) * len(rows)
            assert {cell[:2] for cell in own} == {cell[:2] for cell in everything}
            assert {cell[1:] for cell in own} == {cell[1:] for cell in everything}
        for i in (1, 2):
            assert {cell[i] for cell in own} == {cell[i] for cell in everything}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_meets_every_option(name: str) -> None:
    cells = [*_cells(MASKS, "masks"), *_cells(SHAPES, "shapes")]
    assert {cell[0] for cell in cells if cell[3] == name} == set(OPTIONS)
