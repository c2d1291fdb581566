"""Attention over four virtual JAX devices gives what one gives; programs, collectives, mistakes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

from covering import few
from jax_jobs import Split
from mask_samples import IDS
from virtual_devices import devices

#: Norm of the difference over the norm of the result: roundings of float32.
ALIKE = 1e-6

BATCH_HEADS = Split(batch=2, heads=2)
EXCHANGE = Split(batch=2, sequence=2)
RING = Split(heads=2, sequence=2, strategy="ring", num_heads=(4, 1))
UNEVEN = Split(heads=2, sequence=2, num_heads=(6, 3))


def run(job: str, *arguments: Any) -> Any:
    return devices().run(f"jax_jobs:{job}", *arguments)


def programs(job: str, *arguments: Any) -> Any:
    return devices().run(f"jax_program_jobs:{job}", *arguments)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "split",
    [
        BATCH_HEADS,
        Split(sequence=4),
        Split(batch=2, sequence=2, strategy="ring"),
        long(Split(sequence=4, shared=True)),
        long(Split(sequence=4, strategy="ring", shared=True)),
        long(UNEVEN),
    ],
    ids=str,
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
        (replace(RING, shared=True), "alibi"),
        (Split(batch=2, heads=2, backend="xla"), "shared dense"),
        (Split(heads=4, num_heads=(12, 3)), "relative"),
        (Split(batch=2, heads=2, num_heads=(4, 1), explicit=True), "alibi"),
        (replace(EXCHANGE, explicit=True), "shared alibi"),
        long(BATCH_HEADS, "alibi"),
        long(BATCH_HEADS, "dense"),
        long(replace(EXCHANGE, backend="xla"), "alibi"),
        long(replace(RING, backend="xla"), "alibi"),
        long(Split(sequence=4, strategy="ring", backend="math"), "alibi"),
        long(replace(UNEVEN, backend="math"), "relative"),
    ],
    ids=str,
)
def test_options_with_their_gradients(split: Split, kind: str) -> None:
    found = run("option", split, kind)
    assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.parametrize(("split", "by_key"), [(EXCHANGE, True), (RING, False), long(RING, True)], ids=str)
def test_cross_attention(split: Split, by_key: bool) -> None:
    assert run("cross", split, by_key) < ALIKE


def test_two_axes_split_the_sequence_and_auto_decides() -> None:
    assert run("several_axes") < ALIKE


@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "ring"), long("float16", "exchange")])
def test_narrow_dtypes_round_no_more_than_one_device_does(dtype: str, strategy: str) -> None:
    found = run("narrow", Split(sequence=4, strategy=strategy, dtype=dtype))
    assert {name: pair for name, pair in found.items() if pair[0] > 1.05 * pair[1] + ALIKE} == {}


def test_a_new_mask_each_step_compiles_nothing() -> None:
    counts, error = run("new_masks", RING, 4)
    assert counts == [1] * 4
    assert error < ALIKE


def test_the_sizes_of_an_exchange_settle() -> None:
    counts, error = run("new_masks", EXCHANGE, 12)
    assert counts[-1] <= 4
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


def test_each_device_gets_its_own_lists_and_ragged_pieces_fit() -> None:
    found = programs("ragged")
    assert found["right"] == [True] * 4
    assert found["lowered"] == {"cpu": (0, 3), "tpu": (3, 0), "cuda": (3, 0)}
    assert found["asked"] == {0: 2, 1: 2}  # Once for each part of the batch.


def test_rows_of_another_layout_raise_or_are_nan() -> None:
    found = programs("wrong_rows")
    mismatch = "PlanMismatchError: rows with a plan: expected rows of layout "
    assert found.pop("same")
    assert found.pop("other")
    assert found.pop("mine") == 24
    assert found.pop("unmarked").startswith("DtypeError: rows: expected a marked batch, got dict")
    assert found.pop("shape").startswith("ShapeError: q_index with a split sequence")
    assert all(text.startswith(mismatch) for text in found.values()), found


def test_layers_with_other_masks_share_rows() -> None:
    assert programs("layers", Split(sequence=4)) < ALIKE


def test_one_row_of_packed_documents() -> None:
    assert programs("packed_rows") < ALIKE


def test_second_derivatives() -> None:
    assert programs("second_derivative", "math") < 2 * ALIKE
    with pytest.raises(AssertionError, match=r"second derivatives of .*attention.*'xla'.*backend=.math"):
        programs("second_derivative", "xla")


REFUSALS = {
    "no mesh": "DtypeError: mesh: expected a jax.sharding.Mesh, got dict",
    "no axis": "OptionError: batch: expected axes of the mesh, 'data', 'context', got 'dp'",
    "axis twice": "OptionError: sequence: expected axes that split one dim each, got 'context', which splits heads",
    "axis number": "DtypeError: batch: expected the name of a mesh axis",
    "no mask": "DtypeError: shard: mask: expected a mask expression",
    "no sequence": "OptionError: sequence: expected axes of 2 devices, the ranks of the layout, got 1",
    "ranks": "OptionError: sequence: expected axes of 2 devices, the ranks of the layout, got 4",
    "heads of axis": "ShapeError: query heads of the plan: expected a multiple of 2",
    "batch of axis": "ShapeError: batch rows of the plan: expected a multiple of 2",
    "strategy": 'OptionError: strategy on a JAX mesh: expected "exchange" or "ring", got \'ulysses\'',
    "rows": "ShapeError: q with a split sequence: expected 4 heads and 8 rows",
    "heads of q": "ShapeError: q with a split sequence: expected 4 heads and 8 rows",
    "batch of plan": "ShapeError: q with a split sequence: expected 2 batch rows, 4 heads and 8 rows",
    "batch": "ShapeError: batch rows of q: expected a multiple of 2",
    "query heads": "ShapeError: heads of q: expected a multiple of 2",
    "sequence without a plan": "OptionError: sharding of q: expected the sequence whole",
    "head_dim": "OptionError: sharding of q: expected head_dim whole",
    "other axes": "OptionError: sharding of q: expected batch rows split over ('data',)",
    "dense bias": "OptionError: bias with a split sequence: expected alibi(...) or relative(...)",
    "k_index": "OptionError: k_index with a split sequence: expected None",
    "thd": "ShapeError: layout='thd' with split batch rows: expected batch rows to split",
    "explain inside": "OptionError: plan: expected what plan.on(...) returned",
    "shard of another length": "ShapeError: shard: x: expected 8 rows along axis 1",
    "shard of a q_index": "OptionError: shard: x: expected no entry 'q_index'",
    "shard of a list": "DtypeError: shard: x: expected an array, got list",
    "one row of two": "ShapeError: shard: x: expected 2 batch rows as axis 0",
}


def test_mistakes_are_refused_by_name() -> None:
    said = programs("refusals")
    assert {name: text for name, text in said.items() if not text.startswith(REFUSALS[name])} == {}
    assert set(said) == set(REFUSALS)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import jax, attnspan, attnspan.jax\n"
        "from attnspan.parallel import Layout\n"
        "plan = Layout.of(attnspan.causal(), q_len=5, ranks=1).plan(heads=(2, 1))\n"
        "placed = plan.on(jax.make_mesh((1,), ('context',)), sequence='context')\n"
        "q = placed.shard(jax.numpy.ones((1, 2, 5, 4)), axis=2)\n"
        "out = attnspan.jax.attention(q, q[:, :1], q[:, :1], mask=placed)\n"
        "print(out.shape, len(str(placed.explain())) > 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(1, 2, 5, 4) True\n", done.stderr


def test_the_examples_of_the_page_give_what_one_device_gives() -> None:
    pytest.importorskip("flax")
    text = (Path(__file__).parents[2] / "docs" / "spmd.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    found = programs("page", blocks)
    for name in ("batch and heads", "window", "flax"):
        assert found[name] < ALIKE, name
    assert found["losses"] == pytest.approx(found["losses of one"], rel=1e-5)
    assert found["losses"][-1] != found["losses"][0]
    assert found["traces"] <= 3
