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
from samples.masks import IDS
from virtual_devices import devices

BATCH_HEADS = Split(batch=2, heads=2)
EXCHANGE = Split(batch=2, sequence=2)
RING = Split(heads=2, sequence=2, strategy="ring", num_heads=(4, 1))
UNEVEN = Split(heads=2, sequence=2, num_heads=(6, 3))


def run(job: str, *arguments: Any) -> Any:
    return devices().run(f"jax_jobs:{job}", *arguments)


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
    run("every_mask", split, few(IDS, 14))


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        (EXCHANGE, "alibi"),
        (replace(RING, shared=True), "alibi"),
        (Split(batch=2, heads=2, backend="xla"), "shared dense"),
        (Split(heads=4, num_heads=(12, 3)), "relative"),
        (Split(batch=2, heads=2, num_heads=(4, 1), explicit=3), "alibi"),
        (replace(EXCHANGE, explicit=1), "shared alibi"),
        long(replace(EXCHANGE, explicit=3), "shared alibi"),
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
    run("option", split, kind)


@pytest.mark.parametrize(("split", "by_key"), [(EXCHANGE, True), (RING, False), long(RING, True)], ids=str)
def test_cross_attention(split: Split, by_key: bool) -> None:
    run("cross", split, by_key)


@pytest.mark.parametrize(
    "split", [Split(heads=2, sequence=2), long(replace(RING, num_heads=(4, 2)))], ids=str
)
def test_masks_of_single_heads(split: Split) -> None:
    run("by_head", split)


@pytest.mark.parametrize(
    ("strategy", "axes"), [("auto", ("outer", "inner")), ("ring", ("inner", "outer"))], ids=str
)
def test_two_axes_split_the_sequence(strategy: str, axes: tuple[str, str]) -> None:
    run("several_axes", strategy, axes)


@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "ring"), long("float16", "exchange")])
def test_narrow_dtypes_round_no_more_than_one_device_does(dtype: str, strategy: str) -> None:
    run("narrow", Split(sequence=4, strategy=strategy, dtype=dtype))


@pytest.mark.parametrize(("split", "steps", "most"), [(RING, 4, 1), (EXCHANGE, 12, 4)], ids=str)
def test_new_masks_and_layouts_compile_nothing_once_sizes_settle(split: Split, steps: int, most: int) -> None:
    run("new_masks", split, steps, most)


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


@pytest.mark.parametrize(
    "job", ["inside", "layers", "lists", "lowering", "mapped", "packed_rows", "refusals", "wrong_rows"]
)
def test_programs(job: str) -> None:
    devices().run(f"jax_program_jobs:{job}")


def test_second_derivatives() -> None:
    devices().run("jax_program_jobs:second_derivative", "math")
    with pytest.raises(
        AssertionError, match=r"second derivatives of .*attention.*'xla'.*attnspan.backend..math"
    ):
        devices().run("jax_program_jobs:second_derivative", "xla")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import jax, attnspan, attnspan.jax\n"
        "from attnspan.parallel import Layout\n"
        "layout = Layout.of(attnspan.causal(), q_len=5, ranks=1)\n"
        "mesh = jax.make_mesh((1,), ('context',))\n"
        "rows = layout.on(mesh, sequence='context').shard({'q': jax.numpy.ones((1, 2, 5, 4))}, axis=2)\n"
        "placed = layout.plan(heads=(2, 1)).on(mesh, sequence='context', rows=rows)\n"
        "q = rows['q']\n"
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
    devices().run("jax_program_jobs:page", blocks)
