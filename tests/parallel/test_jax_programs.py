"""Programs over the devices of a JAX mesh: what they consist of, what travels, and what is refused."""

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import numpy as np
from jax import numpy as jnp
from jax_split import ALIKE, BATCH, DIM, Split, check, inputs, oracle, packed
from virtual_devices import on_devices

import attnspan
from attnspan.errors import DeviceError, DtypeError, OptionError, ShapeError
from attnspan.jax import attention, shard
from attnspan.parallel import Layout, PlanMismatchError


@pytest.mark.slow
@on_devices
def test_layers_with_masks_of_their_own_share_rows_within_remat() -> None:
    length = 21
    split = Split(sequence=4)
    masks = attnspan.causal(), attnspan.window(4) & packed(1, length)
    first = split.place(masks[0], length)
    given = inputs(split.num_heads, length, length)
    rows = first.shard({name: given[name] for name in ("q", "k", "v", "dout")}, axis=2)
    second = split.plan(masks[1], layout=first.plan.layout)
    second = second.on(split.mesh, sequence="context", rows=rows)

    @jax.jit
    def run(masks: Any, rows: Any) -> Any:
        @jax.checkpoint
        def call(mask: Any, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=mask, backend=split.backend)

        both = jax.vjp(lambda q, k, v: [call(mask, q, k, v) for mask in masks], *(rows[x] for x in "qkv"))
        return both[0], both[1]([rows["dout"]] * 2)

    outs, gradients = run((first, second), rows)
    named = dict(zip(("dq", "dk", "dv", "out 0", "out 1"), (*gradients, *outs), strict=True))
    got = {name: np.asarray(first.unshard(x, axis=2)) for name, x in named.items()}
    given = {**given, "dlse": np.zeros_like(given["dlse"])}
    wanted = [oracle(given, mask) for mask in masks]
    want = {name: wanted[0][name] + wanted[1][name] for name in ("dq", "dk", "dv")}
    check(got, want | {f"out {i}": x["out"] for i, x in enumerate(wanted)})


@pytest.mark.slow
@on_devices
def test_a_vmap_is_each_mapped_call_and_can_be_lowered_for_tpus() -> None:
    length = 21
    placed = Split(batch=2, sequence=2).place(packed(1, length), length)
    rows = placed.shard(inputs((4, 2), length, length), axis=2)
    stacked = [jnp.stack([rows[x], 2 * rows[x]]) for x in "qkv"]

    def gradients(*arrays: Any) -> Any:
        call = functools.partial(attention, mask=placed, backend="xla")
        return jax.grad(lambda *arrays: (call(*arrays) ** 2).sum(), (0, 1, 2))(*arrays)

    both = jax.jit(jax.vmap(gradients))
    for i in range(2):
        for got, want in zip(both(*stacked), gradients(*(x[i] for x in stacked)), strict=True):
            assert np.linalg.norm(got[i] - want) < ALIKE * np.linalg.norm(want)
    text = both.trace(*stacked).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@ragged_all_to_all") == 3


@pytest.mark.slow
@on_devices
def test_within_a_shard_map_a_plan_has_what_that_left_of_the_mesh() -> None:
    length = 21
    mask = attnspan.causal() & attnspan.documents(np.array([0, 4, 15, length]))
    given = inputs((4, 2), length, length)
    want = {name: oracle(given, mask)[name] for name in ("out", "lse", "dq", "dk", "dv")}
    part, every = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    for explicit, strategy in ((0, "exchange"), (3, "ring")):
        split = Split(batch=2, sequence=2, strategy=strategy, explicit=explicit)
        mesh, plan = split.mesh, split.plan(mask, length, batch=BATCH // 2)
        placed = plan.on(mesh, rows="unchecked", sequence="context")
        rows = placed.shard(given, axis=2)

        def step(placed: Any, q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> Any:
            found, pull = jax.vjp(functools.partial(attention, mask=placed, return_lse=True), q, k, v)
            return *found, *pull((dout, dlse))

        split_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "context"))
        arrays = [jax.device_put(rows[name], split_rows) for name in given]
        specs = (every, *[part] * 5)
        how: Any = {"mesh": mesh, "in_specs": specs, "out_specs": (part,) * 5}
        with jax.set_mesh(mesh):
            run = jax.shard_map(step, **how, axis_names={"data"}, check_vma=False)
            found = jax.jit(run)(placed, *arrays)
            assert all(x.sharding.is_equivalent_to(split_rows, x.ndim) for x in found)
            check({x: placed.unshard(y, axis=2) for x, y in zip(want, found, strict=True)}, want)
    for names, text in (({"data"}, "got check_vma=True"), (set(mesh.axis_names), "leaves whole")):
        how = {"mesh": Split(batch=2, sequence=2).mesh, "in_specs": part, "out_specs": part}
        alone = shard(how["mesh"], heads="context", mask=mask)
        run = jax.shard_map(
            lambda q, k, v, mask=alone: attention(q, k, v, mask=mask), **how, axis_names=names
        )
        with pytest.raises(OptionError, match=f"inside of shard_map: expected .*{text}"):
            jax.jit(run)(*(given[x] for x in "qkv"))


@pytest.mark.slow
@on_devices
def test_the_one_row_of_packed_rows_is_split_as_a_sequence() -> None:
    """Layout "thd", whose one row is split as a sequence."""
    length = 40
    mask = attnspan.causal() & attnspan.documents(np.array([0, 11, 12, 30, length]))
    given = inputs((4, 2), length, length)
    placed = Split(sequence=4).place(mask, length, batch=1, layout=Layout.of(mask, q_len=length, ranks=4))
    rows = placed.shard({x: given[x][0].swapaxes(0, 1) for x in "qkv"}, axis=0, batch_axis=None)
    q, k, v = (rows[x] for x in "qkv")
    found = attention(q, k, v, mask=placed, layout="thd", return_lse=True, q_index=rows["q_index"])
    out, lse = (placed.unshard(x, axis=at, batch_axis=None) for at, x in enumerate(found))
    want = {name: x[0] for name, x in oracle(given, mask).items() if name in ("out", "lse", "dv")}
    check({"out": np.asarray(out).swapaxes(0, 1), "lse": np.asarray(lse), "dv": want["dv"]}, want)


def assert_second_derivatives(backend: str) -> None:
    split = Split(1, 2, 2, backend=backend, shared=True)
    q, k, v, *_ = map(jnp.asarray, inputs(split.num_heads, 8, 8).values())

    def twice(mask: Any, place: Any) -> np.ndarray:
        def loss(q: Any) -> Any:
            return (attention(place(q), place(k), place(v), mask=mask, backend=backend) ** 2).sum()

        return np.asarray(jax.jit(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()))(q))

    placed = split.place(attnspan.causal(), 8)
    got, want = twice(placed, functools.partial(placed.shard, axis=2)), twice(attnspan.causal(), lambda x: x)
    assert np.linalg.norm(got - want) < 2 * ALIKE * np.linalg.norm(want)


@pytest.mark.slow
@on_devices
def test_second_derivatives_are_those_of_one_device_or_refused() -> None:
    assert_second_derivatives("math")
    with pytest.raises(
        NotImplementedError,
        match=r"second derivatives of attention: .*Pass backend=.math",
    ):
        assert_second_derivatives("xla")


@pytest.mark.slow
@on_devices
def test_rows_of_another_layout_are_refused() -> None:
    length = 24
    split, axes = Split(sequence=4), {"sequence": "context"}
    plans = [split.plan(packed(seed, length), length) for seed in range(2)]
    x = {name: inputs((4, 2), length, length)[name] for name in "qkv"}
    rows = [plan.layout.on(split.mesh, **axes).shard(x, axis=2) for plan in plans]
    first = plans[0].on(split.mesh, rows=rows[0], **axes)

    @jax.jit
    def call(placed: Any, rows: Any) -> Any:
        q, k, v = (rows[name] for name in "qkv")
        return attention(q, k, v, mask=placed, q_index=rows["q_index"])

    assert np.isfinite(call(first, rows[0])).all()
    assert np.isnan(call(first, rows[1])).all()
    assert jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(rows[0])[0][0][0]) == "['q']"
    with pytest.raises(ShapeError, match="q_index with a split sequence: expected the rows of"):
        call(first, {**rows[0], "q_index": jnp.zeros((1, 3), int)})
    # Of a data loader: NumPy's, of one rank.
    loader = plans[1].layout.shard({"tokens": np.zeros((BATCH, length), int)}, rank=0)
    moved = jax.device_put(rows[1])  # A dict, whose marks are lost; its rows are not.
    for batch in (rows[1], rows[1].marks, rows[1]["q_index"], moved, loader, loader.marks):
        plans[1].on(split.mesh, rows=batch, **axes)
        with pytest.raises(
            PlanMismatchError,
            match=r"rows of plan.on\(.*: expected (rows of layout|the rows of the plan's layout).*, got",
        ):
            plans[0].on(split.mesh, rows=batch, **axes)
    for given, text in (
        ({}, "none"),
        ({"rows": {"q": rows[0]["q"]}}, "got dict without marks and 'q_index'"),
    ):
        with pytest.raises((DtypeError, OptionError), match=rf"the batch that layout.shard.* {text}"):
            plans[0].on(split.mesh, **given, **axes)


@pytest.mark.slow
@on_devices
def test_the_platform_decides_which_exchange_a_program_has() -> None:
    length = 48
    placed = Split(batch=2, sequence=2).place(packed(0, length), length)
    rows = dict(placed.shard(inputs((4, 2), length, length), axis=2))

    @jax.jit
    def step(placed: Any, rows: Any) -> Any:
        call = functools.partial(attention, mask=placed, backend="xla")
        return jax.vjp(call, *(rows[x] for x in "qkv"))[1](rows["dout"])

    traced = step.trace(placed, rows)
    for platform, counts in {"cpu": (0, 3), "tpu": (3, 0), "cuda": (3, 0)}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert counts == (text.count("@ragged_all_to_all"), text.count('"stablehlo.all_to_all"')), platform


@on_devices
def test_each_mistake_is_named() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout, axes = Layout.of(attnspan.causal(), q_len=8, ranks=2), {"batch": "data", "sequence": "context"}

    def on(
        mask: Any = None, heads: Any = (4, 2), axes: Any = axes, strategy: str = "ring", batch: int = 2
    ) -> Any:
        return layout.plan(mask, heads=heads, batch=batch, strategy=strategy).on(
            mesh, rows="unchecked", **axes
        )

    def apart(batch: int) -> Any:
        return attnspan.segments(np.arange(batch)[:, None].repeat(8, 1))

    def lying(*spec: Any, mesh: Any = mesh) -> Any:
        return jax.device_put(q, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    whole, placed = shard(mesh, batch="data", heads="context"), on()
    spread, ring = whole.attention, placed.attention
    q, k = jnp.ones((BATCH, 4, 8, DIM)), jnp.ones((BATCH, 2, 8, DIM))
    four = [jnp.ones((4, heads, 8, DIM)) for heads in (4, 2, 2)]
    turned = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    thd, split = shard(mesh, batch="data"), Split(sequence=2).place(packed(0, 8), 8)
    calls = {
        "mesh: expected a jax.sharding.Mesh, got dict": lambda: shard({"data": 2}),  # type: ignore[arg-type]
        "batch: expected axes of the mesh, 'data', 'context', got 'dp'": lambda: shard(mesh, batch="dp"),
        "sequence: expected axes that split one dim each": lambda: on(axes={**axes, "heads": "context"}),
        "like: expected a placed plan, or None, got int": lambda: on(axes={**axes, "like": 3}),
        "shard: mask: expected a mask expression": lambda: shard(mesh, mask=q),  # type: ignore[arg-type]
        "sequence: expected axes of 2 devices, .* got 1": lambda: on(axes={"sequence": None}),
        "query heads of the plan: expected a multiple": lambda: on(
            heads=(3, 3), axes={"sequence": "context", "heads": "data"}
        ),
        "batch elements of the plan: expected a multiple of 2": lambda: on(apart(3), batch=3),
        "strategy on a JAX mesh: .* got 'ulysses'": lambda: on(strategy="ulysses"),
        "q with a split sequence: expected 4 heads and 8 rows": lambda: ring(k, k, k),
        "expected 2 batch elements, 4 heads and 8 rows": lambda: on(apart(2)).attention(*four),
        "batch elements of q: expected a multiple of 2": lambda: spread(q[:1], k[:1], k[:1]),
        "heads of q: expected a multiple of 2": lambda: spread(q[:, :3], q[:, :3], q[:, :3]),
        "sharding of q: expected the sequence whole": lambda: spread(lying(None, None, "context"), k, k),
        "q: expected the devices of the mask's mesh": lambda: spread(lying(mesh=turned), k, k),
        "bias with a split sequence: expected alibi": lambda: ring(q, k, k, bias=jnp.zeros((8, 8))),
        "k_index with a split sequence: expected None": lambda: ring(q, k, k, k_index=jnp.arange(8)),
        "layout='thd' with split batch elements": lambda: thd.attention(q[0], q[0], q[0], layout="thd"),
        "plan: expected a plan that plan.on": lambda: jax.jit(lambda x: x.explain())(placed),
        "shard: x: expected 8 rows along axis 1": lambda: placed.shard(jnp.ones((2, 9))),
        "shard: x: expected no entry 'q_index'": lambda: placed.shard({"q_index": np.ones((2, 8))}),
        "shard: x: expected 2 batch elements as axis 0": lambda: split.shard(np.ones((1, 8))),
    }
    for text, call in calls.items():
        with pytest.raises((DeviceError, OptionError, ShapeError, DtypeError), match=text):
            call()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flax") is None, reason="the page shows modules of Flax")
@on_devices
def test_the_examples_of_the_page_give_what_one_device_gives() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spmd.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {"__name__": "page"}
    before: list[Any] = []
    for block in blocks:
        exec(compile(block, "docs/spmd.md", "exec"), names)
        before = before or [jnp.asarray(np.asarray(names[x])) for x in "qkv"]

    def alike(got: Any, want: Any) -> None:
        assert np.linalg.norm(np.asarray(got) - np.asarray(want)) < ALIKE * np.linalg.norm(want)

    def alone(mask: Any, **options: Any) -> Any:
        return jax.jit(functools.partial(attention, mask=mask, layout="bshd", **options))(*before)

    causal, layer = attnspan.causal(), names["layer"]
    mask, slopes = causal & attnspan.segments(np.asarray(names["ids"])), attnspan.alibi_slopes(names["Hq"])
    alike(names["out"], alone(mask))
    alike(names["biased"], alone(causal & attnspan.window(8), bias=attnspan.alibi(slopes)))
    alike(names["flax_out"], layer(jnp.asarray(names["hidden"]), mask=mask, deterministic=True))
    params, losses, step = names["first_params"], [], jax.jit(jax.value_and_grad(names["loss_of"]))
    for seed in range(4):
        whole = {**names["whole_rows"](seed), "q_index": None}
        loss, gradients = step(params, whole, causal & attnspan.segments(whole["ids"]))
        params = jax.tree.map(lambda x, g: np.asarray(x - 0.3 * g), params, gradients)
        losses.append(float(loss))
    assert names["losses"] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] != losses[0]
    assert names["step"]._cache_size() <= 3
