"""Arrays sharded under jit: computed where they are by batch row and head, refused by name otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found():
    job = Path(__file__).parent / "partitioning_jobs.py"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, str(job)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_equal_to_one_device_in_values_and_gradients(found):
    assert len(found["compared"]) == 11
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
        if ", " in name:
            assert result["dq"] == shapes[name.split(", ")[1]], (name, result)


def test_what_needs_keys_of_other_devices_is_refused(found):
    assert len(found["refused"]) == 8
    for name, text in found["refused"].items():
        axis = name[-1]
        assert f"got axis {axis} over 'x'" in text, (name, text)
        assert "attnspan.jax.shard(mesh, sequence=...)" in text, (name, text)


def test_arrays_on_two_devices_are_refused(found):
    assert found["mixed"].startswith("DeviceError: q, k and v: expected one device"), found["mixed"]
