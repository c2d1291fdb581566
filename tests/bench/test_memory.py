"""Peak memory is that of the call: a dense mask shows, and code that was loaded does not."""

import pytest

from attnspan.bench.cells import Workload
from attnspan.bench.memory import high_water_refusal, process_peak

WORK = Workload("w", "own", 1, 1, 1, 4096, 4096, 16, 16, "float32", "window(64)")
MIB = 2**20

pytestmark = pytest.mark.skipif(
    high_water_refusal() is not None, reason=f"{high_water_refusal()}; measure on Linux with /proc"
)


def test_a_dense_mask_is_seen_and_spans_are_not():
    dense = process_peak("sdpa-dense-mask", WORK, "forward", threads=1)
    ours = process_peak("attnspan", WORK, "forward", threads=1)
    square = 4096 * 4096
    assert dense > square, "a byte for each pair at least"
    assert 4096 * 16 * 4 <= ours < square / 4, "the output at least, and nothing of the order of all pairs"
