"""The library's masks in JAX, under jit: the same spans as in NumPy."""

import numpy as np
import pytest
from library_samples import BATCH, HEADS, SAMPLES

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.slow

BY_DATA = {"reordered", "tiled_natten", "morton_natten"}


# One of each: a compilation takes a while.
LAST = {sample.function: sample for sample in SAMPLES}


@pytest.mark.parametrize("sample", LAST.values(), ids=LAST)
def test_traced_by_jax(sample):
    rows = sample.keys if sample.rows is None else sample.rows
    q_index = np.arange(rows, dtype=np.int32)
    sizes = {"batch": BATCH, "heads": HEADS}

    def lowered(index, *arrays):
        return sample.build(*arrays).spans(rows, sample.keys, q_index=index, **sizes).bounds

    # A tree's depth is read outside: it decides R.
    compiled = lowered if sample.function in BY_DATA | {"tree"} else jax.jit(lowered)
    arrays = [x if x.dtype == bool else x.astype(np.int32) for x in sample.arrays]
    got = compiled(jax.numpy.asarray(q_index), *map(jax.numpy.asarray, arrays))
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.asarray(got), lowered(q_index, *sample.arrays))
