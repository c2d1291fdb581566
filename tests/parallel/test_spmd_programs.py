"""Programs of `attnspan.jax.shard`: one for all masks, no hidden collectives; and mistakes by name."""

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")

from spmd_jobs import Split
from virtual_devices import devices

#: Norm of the difference over the norm of the result: roundings of float32.
ALIKE = 1e-6

BATCH_HEADS = Split(batch=2, heads=2)
EXCHANGE = Split(batch=2, sequence=2)
RING = Split(heads=2, sequence=2, strategy="ring", num_heads=(4, 1))


def run(job: str, *arguments: Any) -> Any:
    return devices().run(f"spmd_program_jobs:{job}", *arguments)


def test_a_new_mask_each_step_compiles_nothing() -> None:
    counts, error = devices().run("spmd_jobs:new_masks", RING, 4)
    assert counts == [1] * 4
    assert error < ALIKE


def test_the_sizes_of_an_exchange_settle() -> None:
    counts, error = devices().run("spmd_jobs:new_masks", EXCHANGE, 12)
    assert counts[-1] <= 3
    assert counts[-6:] == [counts[-1]] * 6
    assert error < ALIKE


@pytest.mark.parametrize(
    ("split", "forward", "backward"),
    [
        (BATCH_HEADS, {}, {}),
        (Split(heads=4, num_heads=(12, 3)), {}, {"all-reduce"}),
        (EXCHANGE, {"all-to-all": 1}, {"all-to-all"}),
        (RING, {"collective-permute": 2}, {"all-reduce", "collective-permute"}),
    ],
    ids=["batch x heads", "shared key heads", "exchange", "ring"],
)
def test_nothing_is_gathered_silently(split: Split, forward: dict[str, int], backward: set[str]) -> None:
    assert run("collectives", split, False) == forward
    assert set(run("collectives", split, True)) == set(backward)


def test_layers_with_other_masks_keep_their_rows() -> None:
    assert run("layers", Split(sequence=4)) < ALIKE


def test_one_row_of_packed_documents() -> None:
    assert run("packed_rows") < ALIKE


def test_second_derivatives() -> None:
    assert run("second_derivative", "math") < 2 * ALIKE
    with pytest.raises(AssertionError, match=r"second derivatives of .*attention.*'xla'.*backend=.math"):
        run("second_derivative", "xla")


REFUSALS = {
    "no mesh": "DtypeError: shard: mesh: expected a jax.sharding.Mesh, got dict",
    "no axis": "OptionError: shard: batch: expected axes of the mesh, 'data', 'context', got 'dp'",
    "axis twice": "OptionError: shard: sequence: expected axes that split one dim each, got 'data'",
    "axis number": "DtypeError: shard: batch: expected the name of a mesh axis",
    "no mask": "DtypeError: shard: mask: expected a mask expression",
    "no q_len": "OptionError: shard: q_len: expected the size of the whole problem beside sequence",
    "heads": "OptionError: shard: num_heads: expected (query heads, key heads)",
    "heads of axis": "ShapeError: shard: num_heads: expected a multiple of 2",
    "useless q_len": "OptionError: shard: q_len: expected a mesh axis as sequence beside it",
    "strategy": "OptionError: shard: strategy: expected 'exchange', 'ring' or 'auto', got 'ulysses'",
    "mask of another length": "ShapeError: mask: expected 8 rows and 8 keys",
    "traced mask": "OptionError: shard: mask: expected one whose arrays can be read",
    "rows": "ShapeError: q with a split sequence: expected 4 heads and 8 rows",
    "heads of q": "ShapeError: q with a split sequence: expected 4 heads and 8 rows",
    "batch": "ShapeError: batch rows of q: expected a multiple of 2",
    "query heads": "ShapeError: heads of q: expected a multiple of 2",
    "sequence without a plan": "OptionError: sharding of q: expected a whole sequence, as sequence=None says",
    "head_dim": "OptionError: sharding of q: expected head_dim whole",
    "other axes": "OptionError: sharding of q: expected batch rows split over ('data',)",
    "dense bias": "OptionError: bias with a split sequence: expected alibi(...) or relative(...)",
    "q_index": "OptionError: q_index with a split sequence: expected None",
    "thd": "ShapeError: layout='thd' with split batch rows: expected batch rows to split",
    "explain inside": "OptionError: explain of a sharded attention: expected the one that shard(...)",
    "positions of whole": "OptionError: positions of a sharded attention: expected one whose sequence",
    "shard of another length": "ShapeError: shard: x: expected 8 rows along axis 1",
}


def test_mistakes_are_refused_by_name() -> None:
    said = run("refusals")
    assert {name: text for name, text in said.items() if not text.startswith(REFUSALS[name])} == {}
    assert set(said) == set(REFUSALS)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import jax, attnspan, attnspan.jax\n"
        "mesh = jax.make_mesh((1,), ('context',))\n"
        "whole = {'mask': attnspan.causal(), 'sequence': 'context', 'q_len': 5, 'num_heads': (2, 1)}\n"
        "sharded = attnspan.jax.shard(mesh, **whole)\n"
        "q = sharded.shard(jax.numpy.ones((1, 2, 5, 4)), axis=2)\n"
        "out = attnspan.jax.attention(q, q[:, :1], q[:, :1], mask=sharded)\n"
        "print(out.shape, len(str(sharded.explain())) > 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(1, 2, 5, 4) True\n", done.stderr
