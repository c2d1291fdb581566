"""What the kernels for TPUs take, and how large their tiles are."""

import dataclasses

import pytest

from attnspan.call import Problem
from attnspan.jax.backends import Static
from attnspan.jax.backends import pallas_tpu as pallas
from attnspan.jax.backends.pallas_tpu import sizes
from attnspan.options import DISTANCE

PROBLEM = Problem(1, 8, 8, 4096, 4096, 128, 128, 1, "bfloat16", "tpu")
PLAIN = Static(scale=1.0, mask=("causal",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "it runs on TPUs, not on cpu"),
        ({"dtype": "float64"}, "it takes float32 and bfloat16, which TPUs compute in, not float64"),
        ({"v_dim": 640}, "it takes head dims up to 512, not 128 and 640"),
        ({"runs": 300}, "it takes up to 256 spans a row, not 300"),
        ({"k_len": 0}, "it takes no empty arrays"),
    ],
)
def test_refusals_say_why(change: dict, reason: str | None) -> None:
    assert pallas.supports(dataclasses.replace(PROBLEM, **change), PLAIN) == reason


def test_a_large_distance_table_is_refused_by_name() -> None:
    static = Static(scale=1.0, bias_kind=DISTANCE)
    small = dataclasses.replace(PROBLEM, q_len=1024, k_len=2048)
    assert pallas.supports(small, static) is None
    reason = pallas.supports(dataclasses.replace(small, batch=2), static)
    assert reason is not None
    assert reason.startswith("it makes a distance table a dense bias")
    assert reason.endswith("not 33554432")


def test_there_is_a_configuration_for_whatever_is_taken() -> None:
    for dtype in ("float32", "bfloat16"):
        for dim in (8, 128, pallas.MAX_HEAD_DIM):
            for length in (1, 130, 100_000):
                problem = Problem(1, 1, 1, length, length, dim, dim, 1, dtype, "tpu")
                for direction in ("forward", "backward"):
                    found = sizes.default(problem, direction)
                    assert sizes.vmem_bytes(problem, direction, *found) <= sizes.BUDGET
                    assert all(size % 128 == 0 for size in found)
