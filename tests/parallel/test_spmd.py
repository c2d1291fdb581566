"""`attnspan.jax.shard` on four virtual devices gives what one device gives."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jax")

from covering import few
from mask_samples import IDS
from spmd_jobs import Split
from virtual_devices import devices

#: Norm of the difference over the norm of the result: roundings of float32.
ALIKE = 1e-6

BATCH_HEADS = Split(batch=2, heads=2)
EXCHANGE = Split(batch=2, sequence=2)
UNEVEN = Split(heads=2, sequence=2, num_heads=(6, 3))
RING = Split(heads=2, sequence=2, strategy="ring", num_heads=(4, 1))


def run(job: str, *arguments: Any) -> Any:
    return devices().run(f"spmd_jobs:{job}", *arguments)


@pytest.mark.parametrize(
    "split",
    [
        BATCH_HEADS,
        Split(sequence=4),
        Split(batch=2, sequence=2, strategy="ring"),
        pytest.param(UNEVEN, marks=pytest.mark.long),
    ],
    ids=["batch x heads", "sequence", "batch x sequence, ring", "heads x sequence"],
)
def test_every_mask(split: Split) -> None:
    names = few(IDS, 14)
    found, traces = run("every_mask", split, names)
    assert list(found) == names
    assert {name: error for name, error in found.items() if not error < ALIKE} == {}
    assert traces <= 2


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        (EXCHANGE, "alibi"),
        (RING, "alibi"),
        (Split(batch=2, heads=2, backend="xla"), "shared dense"),
        (Split(heads=4, num_heads=(12, 3)), "relative"),
        (Split(batch=2, heads=2, num_heads=(4, 1), explicit=True), "alibi"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (BATCH_HEADS, "alibi"),
                (BATCH_HEADS, "dense"),
                (replace(EXCHANGE, backend="xla"), "alibi"),
                (replace(RING, backend="xla"), "alibi"),
                (replace(EXCHANGE, explicit=True), "shared alibi"),
                (Split(sequence=4, strategy="ring", backend="math"), "alibi"),
                (replace(UNEVEN, backend="math"), "relative"),
            )
        ),
    ],
)
def test_options_with_their_gradients(split: Split, kind: str) -> None:
    found = run("option", split, kind)
    assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.parametrize("split", [EXCHANGE, RING], ids=["exchange", "ring"])
def test_cross_attention(split: Split) -> None:
    assert max(run("cross", split).values()) < ALIKE


def test_two_axes_split_the_sequence() -> None:
    assert max(run("several_axes").values()) < ALIKE


@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [("bfloat16", "ring"), pytest.param("float16", "exchange", marks=pytest.mark.long)],
)
def test_narrow_dtypes_round_no_more_than_one_device_does(dtype: str, strategy: str) -> None:
    found = run("narrow", Split(sequence=4, strategy=strategy, dtype=dtype))
    assert {name: pair for name, pair in found.items() if pair[0] > 1.05 * pair[1] + ALIKE} == {}
