"""Peak memory is that of the call: a dense mask shows, and code that was loaded does not."""

from dataclasses import replace

import pytest
import torch

from attnspan.tools.bench.cells import Workload
from attnspan.tools.bench.devices import HostDevice
from attnspan.tools.bench.memory import high_water_refusal, peak_here, process_peak
from attnspan.tools.bench.peers import Ready, peers_by_name
from attnspan.tools.bench.timing import MeasurementError

WORK = Workload("w", "own", 1, 1, 1, 4096, 4096, 16, 16, "float32", "window(64)")
MIB = 2**20

pytestmark = pytest.mark.skipif(
    high_water_refusal() is not None, reason=f"{high_water_refusal()}; measure on Linux with /proc"
)


def test_a_process_that_fails_says_why():
    unreadable = replace(WORK, dtype="float8")
    with pytest.raises(MeasurementError, match="memory of attnspan: expected a process that ends with a fig"):
        process_peak("attnspan", unreadable, "forward", threads=1)


def test_a_dense_mask_is_seen_and_spans_are_not():
    dense = process_peak("sdpa-dense-mask", WORK, "forward", threads=1)
    ours = peak_here(peers_by_name()["attnspan"], WORK, "forward")
    square = 4096 * 4096
    assert dense > square, "a byte for each pair at least"
    assert 4096 * 16 * 4 <= ours < square / 4, "the output at least, and nothing of the order of all pairs"


def test_what_only_the_first_call_needs_is_not_counted():
    class Compiling:
        name = "compiling"

        def refuses(self, _job):
            return None

        def prepare(self, _job):
            sizes = iter([512 * MIB])
            return Ready(lambda: torch.ones(next(sizes, 32 * MIB), dtype=torch.uint8), HostDevice())

    peak = peak_here(Compiling(), WORK, "forward")
    assert 32 * MIB <= peak < 256 * MIB


@pytest.mark.long
@pytest.mark.parametrize("name", ["attnspan", "sdpa-dense-mask", "sdpa-per-document"])
def test_every_peer_is_warmed_up_on_a_problem_that_it_can_do(name):
    packed = replace(WORK, q_len=64, k_len=64, mask="causal & documents([0, 10, 64])")
    assert peak_here(peers_by_name()[name], packed, "forward+backward") >= 0
