"""Arrays sharded under jit: computed where they are by batch row and head, refused by name otherwise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from covering import everything

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    job = Path(__file__).parent / "partitioning_jobs.py"
    cases = "all" if everything() else "some"
    done = subprocess.run([sys.executable, str(job), cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_equal_to_one_device_in_values_and_gradients(found):
    assert len(found["compared"]) == 8 if everything() else 4
    for name, result in found["compared"].items():
        assert result["difference"] < 2e-6, (name, result)


def test_nothing_is_gathered(found):
    for name, result in found["compared"].items():
        # On explicit meshes a gradient of slopes goes back to where the slopes were: a number for each head.
        allowed = 1 if name.startswith("explicit") and "alibi" in name else 0
        assert result["gathers"] <= allowed, (name, result)
        assert result["exchanges"] == 0, (name, result)


def test_gradients_lie_where_their_arrays_do(found):
    shapes = {"batch x heads": "(2, 4, 32, 16)", "batch": "(1, 8, 32, 16)", "heads": "(4, 4, 32, 16)"}
    for name, result in found["compared"].items():
        assert result["dq"] == shapes[name.split(", ")[1]], (name, result)


def test_what_needs_keys_of_other_devices_is_refused(found):
    assert len(found["refused"]) == 8
    for name, text in found["refused"].items():
        axis = name[-1]
        assert f"got axis {axis} over 'x'" in text, (name, text)
        assert "layout.plan(...).on(mesh, sequence=...)" in text, (name, text)


def test_arrays_on_two_devices_are_refused(found):
    assert found["mixed"].startswith("DeviceError: q, k and v: expected one device"), found["mixed"]


@pytest.mark.parametrize("backend", ["cpu", "xla", "math"])
def test_inside_shard_map_gradients_of_shared_parameters_are_summed(found, backend):
    assert found["shard_map"][backend] < 2e-6


def test_one_key_head_is_of_every_device(found):
    assert max(found["one key head"].values()) < 2e-6, found["one key head"]


def test_key_heads_that_the_mesh_does_not_divide_are_refused(found):
    assert "expected parts that divide the 2 key heads, got 4 parts" in found["key heads"]
    assert "attnspan.jax.shard(mesh, heads=...)" in found["key heads"]


def test_one_axis_for_rows_and_heads_is_refused(found):
    assert (
        "expected batch rows and heads over axes of their own, got both over 'x'" in found["one axis twice"]
    )


def test_a_shard_map_over_some_axes_is_refused_where_others_split_heads(found):
    for text in found["some axes"]:
        assert "pass mask=attnspan.jax.shard(mesh, mask=..., heads=...)" in text, text


def test_ids_that_lie_elsewhere_are_brought(found):
    assert found["split ids"] < 2e-6


def test_a_mapped_axis_leaves_the_batch_where_it_is(found):
    gathers, different = found["mapped"]
    assert gathers == 0
    assert different < 2e-6
