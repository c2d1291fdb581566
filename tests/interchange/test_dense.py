"""Booleans of a mask, for all sizes and in compiled functions."""

from __future__ import annotations

import numpy as np
import pytest
from every_mask import every_mask

import attnspan as a
from attnspan.interchange import to_dense


def test_every_mask_and_its_spans_are_written() -> None:
    for x in every_mask():
        sizes = {"batch": 2, "heads": x.dense.shape[1]}
        np.testing.assert_array_equal(to_dense(x.mask, **x.options(), **sizes), x.dense)
        np.testing.assert_array_equal(to_dense(x.mask.lowered, **x.options()), x.dense)
    assert to_dense(a.causal(), 3).shape == (1, 1, 3, 3)


def test_a_compiled_function_writes_booleans() -> None:
    jax = pytest.importorskip("jax")
    found = jax.jit(lambda ids: to_dense(a.segments(ids), 3))(np.array([1, 1, 2]))
    assert found[0, 0].astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="to_dense: mask"):
        to_dense(np.ones((2, 2)), 2)
