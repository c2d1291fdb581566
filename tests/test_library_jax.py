"""The library's masks in JAX, under jit: the same spans as in NumPy."""

import numpy as np
import pytest
from library_samples import BATCH, HEADS, SAMPLES

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.slow

BY_DATA = {"reordered", "tiled_natten", "morton_natten"}


# One of each: a compilation takes a while.
LAST = {sample.function: sample for sample in SAMPLES}
# A tree's depth is read outside: it decides R.
EAGER = [sample for sample in LAST.values() if sample.function in BY_DATA | {"tree"}]
TRACED = [sample for sample in LAST.values() if sample not in EAGER]


def _inputs(sample, convert):
    rows = sample.keys if sample.rows is None else sample.rows
    arrays = [x if x.dtype == bool else x.astype(np.int32) for x in sample.arrays]
    return [convert(x) for x in (np.arange(rows, dtype=np.int32), *arrays)]


def _lowered(sample, index, *arrays):
    sizes = {"batch": BATCH, "heads": HEADS}
    return sample.build(*arrays).spans(len(index), sample.keys, q_index=index, **sizes).bounds


@pytest.mark.parametrize(
    "samples", [pytest.param(EAGER, id="eager", marks=pytest.mark.long), pytest.param(TRACED, id="jit")]
)
def test_traced_by_jax(samples):
    def lower(inputs):
        return [_lowered(sample, *given) for sample, given in zip(samples, inputs, strict=True)]

    run = lower if samples is EAGER else jax.jit(lower)
    found = run([_inputs(sample, jax.numpy.asarray) for sample in samples])
    for sample, got in zip(samples, found, strict=True):
        assert isinstance(got, jax.Array)
        want = _lowered(sample, _inputs(sample, np.asarray)[0], *sample.arrays)
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=sample.name)
