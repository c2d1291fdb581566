"""Option x mask x dtype x backend, forward and every gradient, against the oracle in float64."""

import math
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from conformance_backends import BACKENDS
from conformance_cases import DTYPES, FEW, OPTIONS, SHAPES, Cell, Shape, error, make, oracle
from conformance_masks import MASKS

# Sums are in float32, and so is the exponential: in bf16 it is cut to what that needs (csrc/softmax.h).
EXPONENTIAL = {torch.float32: 6.5e-8, torch.bfloat16: 3.3e-6, torch.float16: 6.5e-8}

# Times the error that no implementation can avoid, which is a root of a mean of squares: of a result of a few
# elements, six sigma.
FACTOR, FACTOR_OF_FEW = 3, 6


def _check(cell: Cell, name: str) -> None:
    backend = BACKENDS[name]
    if backend.refusal(cell.option):
        pytest.skip(f"{name} does not support {cell.option}: {backend.refusal(cell.option)}")
    problem = make(cell)
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


def _cells(rows: Iterable[str]) -> list[tuple[str, str, str, str]]:
    """Option, mask or shape, dtype, backend: backends last, so that they share what the oracle computed."""
    rows = list(rows)
    return [
        (option, row, dtype, backend)
        for i, option in enumerate(OPTIONS)
        for j, row in enumerate(rows)
        for d, dtype in enumerate(DTYPES)
        for backend in BACKENDS
        if BACKENDS[backend].takes(i, j, d, len(rows))
    ]


@pytest.mark.parametrize(("option", "mask", "dtype", "backend"), _cells(MASKS))
def test_option_under_mask(option: str, mask: str, dtype: str, backend: str) -> None:
    _check(Cell(option, mask, Shape(), DTYPES[dtype]), backend)


@pytest.mark.parametrize(("option", "shape", "dtype", "backend"), _cells(SHAPES))
def test_option_in_shape(option: str, shape: str, dtype: str, backend: str) -> None:
    _check(Cell(option, "random", SHAPES[shape], DTYPES[dtype]), backend)


@pytest.mark.parametrize("rows", [MASKS, SHAPES])
def test_a_share_of_the_cells_has_what_it_says(rows: dict[str, object]) -> None:
    cells = _cells(rows)
    assert len([c for c in cells if c[3] == "torch:cpu"]) == len(OPTIONS) * len(rows) * len(DTYPES)
    for name, backend in BACKENDS.items():
        own = [c[:3] for c in cells if c[3] == name]
        for i, values in enumerate((OPTIONS, rows, DTYPES)):
            assert {c[i] for c in own} == set(values)
        if backend.share == "pairs":
            assert {c[:2] for c in own} == set(product(OPTIONS, rows))
            assert {(c[0], c[2]) for c in own} == set(product(OPTIONS, DTYPES))
            assert {c[1:] for c in own} == set(product(rows, DTYPES))
