"""Arrays sharded under jit: computed where they are by batch row and head, refused by name otherwise."""

import pytest

pytest.importorskip("jax")

from virtual_devices import devices

pytestmark = pytest.mark.slow


def run(job, *arguments):
    devices().run(f"partitioning_jobs:{job}", *arguments)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "case",
    [
        ("Explicit", "batch x heads", "alibi, sinks", "bshd"),
        ("Auto", "batch", "alibi, sinks"),
        ("Auto", "heads", "dense, dropout"),
        ("Auto", "batch x heads", "table, sinks", "bhsd", "xla"),
        long(("Auto", "batch x heads", "none", "bshd")),
        long(("Explicit", "batch x heads", "none", "bshd")),
        long(("Auto", "heads", "alibi, sinks")),
        long(("Auto", "batch x heads", "table, sinks")),
    ],
    ids=", ".join,
)
def test_equal_to_one_device_where_arrays_lie(case):
    run("compare", *case)


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_what_needs_keys_of_other_devices_is_refused(axes, jit, axis):
    run("refusal", axes, jit, axis)


@pytest.mark.parametrize("backend", ["cpu", "xla", "math"])
def test_inside_shard_map_gradients_of_shared_parameters_are_summed(backend):
    run("inside_shard_map", backend)


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_a_shard_map_over_some_axes_is_refused_where_others_split_heads(axes):
    run("some_axes", axes)


@pytest.mark.parametrize("spec", ["batch x heads", "heads"])
def test_one_key_head_is_of_every_device(spec):
    run("one_key_head", spec)


@pytest.mark.parametrize("job", ["mapped", "refusals", "split_ids"])
def test_programs(job):
    run(job)
