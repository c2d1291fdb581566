"""Option x mask x dtype x backend, forward and every gradient, against the oracle in float64."""

import math

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


# Backends last, so that they share what the oracle computed.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_under_mask(option: str, mask: str, dtype: str, backend: str) -> None:
    _check(Cell(option, mask, Shape(), DTYPES[dtype]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_in_shape(option: str, shape: str, dtype: str, backend: str) -> None:
    _check(Cell(option, "random", SHAPES[shape], DTYPES[dtype]), backend)
