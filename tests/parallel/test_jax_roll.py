"""A roll over JAX devices gives the rows of `jnp.roll` of the whole, with its gradients."""

from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from virtual_devices import on_devices

from attnspan import causal, segments
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.jax import attention
from attnspan.parallel import Layout, roll
from attnspan.parallel.jax.roll import _roll as programs

LENGTH, BATCH = 37, 2


def ids_of(salt: int = 0) -> np.ndarray:
    random = np.random.default_rng(salt)
    return np.stack(
        [np.repeat(np.arange(LENGTH), random.integers(1, 12, LENGTH))[:LENGTH] for _ in range(BATCH)]
    )


def mesh_of(sequence: int, data: int = 1, kind: AxisType = AxisType.Auto) -> Any:
    devices = jax.devices()[: sequence * data]
    return jax.make_mesh(
        (data, 1, sequence), ("data", "model", "context"), axis_types=(kind,) * 3, devices=devices
    )


AXES = {"sequence": "context", "batch": "data", "heads": "model"}


def layouts(ranks: int) -> dict[str, Layout]:
    sizes: dict[str, Any] = {"q_len": LENGTH, "ranks": ranks, "rows_per_chunk": 2}
    return {
        "contiguous": Layout.contiguous(LENGTH, ranks),
        "zigzag": Layout.of(causal(), method="zigzag", **sizes),
        "documents": Layout.of(causal() & segments(ids_of()), batch=BATCH, **sizes),
    }


def wanted_of(x: Any, shift: int, ids: Any, fill: Any) -> Any:
    """The definition, for whole x (B, S, ...)."""
    if ids is None:
        return jnp.roll(x, shift, 1)
    rows = np.arange(LENGTH)
    source = np.clip(rows - shift, 0, LENGTH - 1)
    seen = (source == rows - shift) & (ids[:, source] == ids)
    return jnp.where(seen.reshape(*seen.shape, *[1] * (x.ndim - 2)), x[:, source], jnp.asarray(fill, x.dtype))


#: Layout, shifts and whether rows stay inside their documents.
CASES = [("contiguous", (-1,), True), ("zigzag", (5, -2), False), ("documents", (-1, -2), True)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@on_devices
def test_a_roll_is_that_of_the_whole(ranks: int) -> None:
    mesh, random = mesh_of(ranks), np.random.default_rng(0)
    for name, shifts, inside in CASES:
        layout, ids = layouts(ranks)[name], ids_of() if inside else None
        x = random.standard_normal((BATCH, LENGTH, 3), np.float32)
        labels = random.integers(0, 9, (BATCH, LENGTH))
        dout = random.standard_normal((len(shifts), *x.shape), np.float32)
        placing = layout.on(mesh, **AXES)
        rows = placing.shard({"x": x, "labels": labels})
        plan = layout.plan_roll(shifts, within=ids).on(mesh, rows=rows, **AXES)

        @jax.jit
        def run(plan: Any, rows: Any, dout: Any, shifts: Any = shifts) -> Any:
            out, pull = jax.vjp(lambda hidden: roll(hidden, shifts, plan), rows["x"])
            return out, pull(tuple(dout)), roll(rows["labels"], shifts, plan, fill=-100)

        out, (grad,), targets = run(plan, dict(rows), [placing.shard(d) for d in dout])
        want, pull = jax.vjp(
            lambda y, ids=ids, by=shifts: [wanted_of(y, s, ids, 0) for s in by], jnp.asarray(x)
        )
        for at, shift in enumerate(shifts):
            np.testing.assert_array_equal(plan.unshard(out[at]), want[at], name)
            whole = wanted_of(jnp.asarray(labels), shift, ids, -100)
            np.testing.assert_array_equal(plan.unshard(targets[at]), whole, name)
            padding = ~np.broadcast_to(plan.valid, targets[at].shape)
            assert (np.asarray(targets[at])[padding] == -100).all()
        np.testing.assert_allclose(plan.unshard(grad), pull(list(dout))[0], atol=1e-6)


@pytest.mark.slow
@on_devices
def test_meshes_of_two_axes_dtypes_and_dimensions() -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh, layout = mesh_of(2, 2, kind), layouts(2)["documents"]
        placing = layout.on(mesh, sequence="context", batch="data")
        for dtype in ("float32", "bfloat16", "int32", "bool"):
            x = jnp.asarray(np.random.default_rng(1).integers(0, 9, (BATCH, 2, LENGTH, 3))).astype(dtype)
            got = roll(
                placing.shard(x, axis=2), -1, layout, mesh=mesh, dim=2, sequence="context", batch="data"
            )
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(placing.unshard(got, axis=2), jnp.roll(x, -1, 2))
    # An axis of the heads splits no roll.
    heads = jax.make_mesh((2, 2), ("model", "context"), axis_types=(AxisType.Auto,) * 2)
    placed = layout.plan_roll(-1).on(heads, rows="unchecked", sequence="context", heads="model")
    x = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    np.testing.assert_array_equal(placed.unshard(roll(placed.shard(x), -1, placed)), np.roll(x, -1, 1))
    one = mesh_of(3)
    line = layouts(3)["zigzag"].on(one, sequence="context").shard(np.arange(LENGTH), axis=0, batch_axis=None)
    got = roll(line, 1, layouts(3)["zigzag"], mesh=one, dim=0, sequence="context")
    found = layouts(3)["zigzag"].on(one, sequence="context").unshard(got, axis=0, batch_axis=None)
    np.testing.assert_array_equal(found, np.roll(np.arange(LENGTH), 1))


@pytest.mark.slow
@on_devices
def test_one_collective_and_no_recompilation_for_another_plan() -> None:
    mesh, sizes, before = mesh_of(4), set(), None

    @jax.jit
    def run(plan: Any, x: Any) -> Any:
        return roll(x, (-1, -2), plan)

    for seed in range(5):
        layout = Layout.of(
            causal() & segments(ids_of(seed)), q_len=LENGTH, ranks=4, batch=BATCH, rows_per_chunk=2
        )
        plan = layout.plan_roll((-1, -2), within=ids_of(seed))
        before = placed = plan.on(mesh, rows="unchecked", like=before, **AXES)
        x = placed.shard(np.ones((BATCH, LENGTH, 8), np.float32))
        text = run.lower(placed, x).compile().as_text()
        assert (text.count(" all-to-all("), text.count(" all-gather(")) == (1, 0)
        run(placed, x)
        sizes.add(int(plan.traffic().counts.sum()))
    assert len(sizes) > 1
    assert run._cache_size() <= 3


@pytest.mark.slow
@on_devices
def test_fills_do_not_recompile_and_empty_arrays_roll() -> None:
    mesh, layout = mesh_of(2), layouts(2)["zigzag"]
    plan = layout.plan_roll(-1, within=ids_of()).on(mesh, rows="unchecked", **AXES)
    x = plan.shard(np.ones((BATCH, LENGTH), np.float32))
    before = programs._cache_size()
    for fill in (float("nan"), float("nan"), 0, -1.5, np.float32(2)):
        found = np.asarray(plan.unshard(roll(x, -1, plan, fill=fill)))
        np.testing.assert_array_equal(found, wanted_of(jnp.ones((BATCH, LENGTH)), -1, ids_of(), fill))
    assert programs._cache_size() <= before + 1
    for shape in ((BATCH, 2 * layout.rows_per_rank, 0), (0, 2 * layout.rows_per_rank)):
        one = layout.plan_roll((-1, 2)).on(mesh, rows="unchecked", **AXES)
        assert [y.shape for y in roll(jnp.ones(shape), (-1, 2), one)] == [shape] * 2


@on_devices
def test_it_can_be_lowered_for_tpus_with_its_gradient() -> None:
    mesh = mesh_of(4)
    layout = layouts(4)["zigzag"]
    placed = layout.plan_roll(-1).on(mesh, rows="unchecked", **AXES)
    x = placed.shard(np.ones((BATCH, LENGTH, 8), np.float32))
    step = jax.jit(lambda placed, x: jax.vjp(lambda x: roll(x, -1, placed), x)[1](x))
    traced = step.trace(placed, x)
    for platform, name in (("cpu", '"stablehlo.all_to_all"'), ("tpu", "@ragged_all_to_all")):
        assert name in traced.lower(lowering_platforms=(platform,)).as_text()


@on_devices
def test_each_mistake_is_explained_in_jax() -> None:
    mesh, layout, packed = mesh_of(2), layouts(2)["zigzag"], layouts(2)["documents"]
    plan = layout.plan_roll(-1).on(mesh, rows="unchecked", **AXES)
    apart = packed.plan_roll(-1).on(mesh, rows="unchecked", **AXES)
    n = 2 * layout.rows_per_rank
    x, q = jnp.zeros((BATCH, n)), jnp.zeros((1, 1, n, 8))
    calls: dict[str, Any] = {
        f"roll: x: expected {n} rows of all devices along axis 1": lambda: roll(x[:, :3], -1, plan),
        "roll: x: expected .* along axis 2": lambda: roll(x, -1, plan, dim=2),
        "roll: x: expected 2 batch elements as axis 0": lambda: roll(x[:1], -1, apart),
        "roll: shifts: expected an int, got float": lambda: roll(x, -1.0, plan),
        r"roll: plan: expected a plan for shifts \(2,\)": lambda: roll(x, 2, plan),
        "roll: plan: .* PlacedPlan that rolls nothing": lambda: roll(
            x, -1, layout.plan(causal(), heads=(1, 1)).on(mesh, rows="unchecked", **AXES)
        ),
        "roll: x: expected a JAX or NumPy array, got dict": lambda: roll({"x": x}, -1, plan),
        "roll: within: expected ids whose values can be read, got a traced": lambda: jax.jit(
            lambda ids: layout.plan_roll(-1, within=ids).shifts
        )(ids_of()),
        "sequence: expected axes of 2 devices, .* got 1: no axis. Pass sequence=": lambda: roll(
            x, -1, layout, mesh=mesh
        ),
        "fill of roll: x: expected a value of float32, got 1j": lambda: roll(x, -1, plan, fill=1j),
        "fill of roll: x: expected a value of int32": lambda: roll(x.astype(jnp.int32), -1, plan, fill=0.5),
        "sharding of roll: x: expected head_dim whole": lambda: roll(
            jax.device_put(
                jnp.zeros((BATCH, n, 2)), NamedSharding(mesh, PartitionSpec(None, None, "context"))
            ),
            -1,
            plan,
        ),
        "expected a plan for attention, got a plan of a roll": lambda: attention(q, q, q, mask=plan),
    }
    for text, call in calls.items():
        with pytest.raises((OptionError, ShapeError, DtypeError), match=text):
            call()
