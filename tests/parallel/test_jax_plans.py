"""Attention over four virtual JAX devices gives what one gives; collectives; what compiles again."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import numpy as np
from covering import few
from jax import numpy as jnp
from jax_split import ALIKE, DIM, Split, attend, check, errors, inputs, oracle, packed, traces
from samples.masks import BATCH, IDS, KEYS, SAMPLES
from virtual_devices import on_devices

import attnspan
from attnspan.call.options import ALIBI, DENSE, DISTANCE, Options
from attnspan.jax import attention, dropout_seeds
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans
from attnspan.parallel import Layout
from attnspan.parallel.jax import Sharded

BATCH_HEADS = Split(batch=2, heads=2)
EXCHANGE = Split(batch=2, sequence=2)
RING = Split(heads=2, sequence=2, strategy="ring", num_heads=(4, 1))
UNEVEN = Split(heads=2, sequence=2, num_heads=(6, 3))


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@functools.cache
def most_spans() -> int:
    return max(sample.mask().prepare(KEYS, KEYS, batch=BATCH).lowered.runs for sample in SAMPLES)


def two_rows(mask: Any) -> Prepared:
    """A mask for two batch rows, with as many spans as any sample has: the same program serves all."""
    placed = mask.prepare(KEYS, KEYS, batch=BATCH)
    bounds = np.broadcast_to(placed.lowered.bounds, (BATCH, *placed.lowered.bounds.shape[1:]))
    bounds = np.pad(bounds, [(0, 0)] * 3 + [(0, most_spans() - bounds.shape[3]), (0, 0)])
    index = placed.q_index
    return Prepared(Spans(bounds, KEYS), np.arange(KEYS, dtype=np.int32)[None] if index is None else index)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split",
    [
        BATCH_HEADS,
        Split(batch=2, sequence=2, strategy="ring"),
        long(Split(sequence=4)),
        long(Split(sequence=4, shared=True)),
        long(Split(sequence=4, strategy="ring", shared=True)),
        long(UNEVEN),
    ],
    ids=str,
)
@on_devices
def test_every_mask(split: Split) -> None:
    # One program for each kind of mask, with room for all.
    traces.clear()
    like = split.place(two_rows(attnspan.full())) if split.sequence else None
    for name in few(IDS, 8):
        mask = next(sample for sample in SAMPLES if sample.name == name).mask()
        sharded = split.place(two_rows(mask), like=like)
        got = attend(sharded, inputs(split.num_heads), backend=split.backend)
        check(got, oracle(inputs(split.num_heads), mask), name)
    assert len(traces) <= 2


def options_of(kind: str, heads: int, length: int) -> tuple[dict[str, Any], Options]:
    """Keywords of a call, and the same for the oracle."""
    random = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    sinks, seed = normal(heads), np.array(0x0123_4567_89AB_CDEF)
    if kind == "alibi":
        slopes = np.abs(normal(BATCH, heads)) / 16
        keywords = {"bias": attnspan.alibi(slopes), "dropout_seed": dropout_seeds(seed, BATCH, heads)}
        return {**keywords, "sinks": sinks}, Options(1.5, slopes, ALIBI, sinks, 0.3, seed)
    if kind == "shared alibi":
        slopes = np.abs(normal(heads)) / 16
        return {"bias": attnspan.alibi(slopes)}, Options(0.0, slopes[None], ALIBI)
    if kind == "relative":
        table = normal(heads, 9)
        keywords = {"bias": attnspan.relative(table), "sinks": sinks}
        return keywords, Options(0.0, table, DISTANCE, sinks)
    shape = {"dense": (BATCH, 1, length, length), "shared dense": (1, heads, 1, length)}[kind]
    values = normal(*shape)
    return {"bias": attnspan.dense_bias(values)}, Options(0.0, values, DENSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "kind"),
    [
        (EXCHANGE, "alibi"),
        (replace(RING, shared=True), "alibi"),
        (Split(heads=4, num_heads=(12, 3)), "relative"),
        (replace(EXCHANGE, explicit=1), "shared alibi"),
        long(Split(batch=2, heads=2, backend="xla"), "shared dense"),
        long(Split(batch=2, heads=2, num_heads=(4, 1), explicit=3), "alibi"),
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
@on_devices
def test_options_with_their_gradients(split: Split, kind: str) -> None:
    length = 21
    mask = packed(3, length)
    keywords, lowered = options_of(kind, split.num_heads[0], length)
    static: dict[str, Any] = {"backend": split.backend}
    if lowered.dropout_p:
        static |= {"softcap": lowered.softcap, "dropout_p": lowered.dropout_p}
    given = inputs(split.num_heads, length, length)
    got = attend(split.place(mask, length), given, jax.tree.map(jnp.asarray, keywords), **static)
    check(got, oracle(given, mask, lowered))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "by_key"), [(EXCHANGE, True), long(RING, False), long(RING, True)], ids=str
)
@on_devices
def test_cross_attention(split: Split, by_key: bool) -> None:
    # Keys are another sequence, with a layout of their own or in order.
    q_len, k_len = 13, 22
    mask = attnspan.key_padding(np.array([k_len, 9])) & attnspan.window(11, 3)
    keys = Layout.of(q_len=k_len, ranks=split.sequence, method="zigzag", rows_per_chunk=3)
    given = inputs(split.num_heads, q_len, k_len)
    sharded = split.place(mask, q_len, k_len=k_len, keys=keys if by_key else None)
    check(attend(sharded, given, backend=split.backend), oracle(given, mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [Split(heads=2, sequence=2), long(replace(RING, num_heads=(4, 2)))], ids=str
)
@on_devices
def test_masks_of_single_heads(split: Split) -> None:
    length = 21
    mask = attnspan.from_predicate(lambda _, h, q, k: (k <= q) & (k + 3 * h + 2 >= q))
    given = inputs(split.num_heads, length, length)
    for each in (mask, mask & packed(5, length)):  # Of batch rows that share it, or not.
        check(attend(split.place(each, length), given), oracle(given, each))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "axes"), [long("auto", ("outer", "inner")), ("ring", ("inner", "outer"))], ids=str
)
@on_devices
def test_two_axes_split_the_sequence(strategy: str, axes: tuple[str, str]) -> None:
    # The first of them named is the outermost.
    length = 21
    mesh = jax.make_mesh((2, 2), ("outer", "inner"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mask, given = packed(4, length), inputs((4, 2), length, length)
    plan = Split(sequence=4, strategy=strategy).plan(mask, length)
    check(attend(plan.on(mesh, rows="unchecked", sequence=axes), given), oracle(given, mask))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "ring"), long("float16", "exchange")])
@on_devices
def test_narrow_dtypes_round_no_more_than_one_device_does(dtype: str, strategy: str) -> None:
    split, length = Split(sequence=4, strategy=strategy, dtype=dtype), 37
    mask, whole = packed(2, length), inputs(split.num_heads, length, length)
    given = {name: np.asarray(jnp.asarray(x, split.dtype)) for name, x in whole.items()}
    given["dlse"] = whole["dlse"]
    want = oracle({name: x.astype(np.float32) for name, x in given.items()}, mask)
    alone = replace(split, batch=1, heads=1, sequence=0)
    ours, one = (errors(attend(x.place(mask, length), given), want) for x in (split, alone))
    assert not {name: (x, one[name]) for name, x in ours.items() if not x < 1.05 * one[name] + ALIKE}


@pytest.mark.slow
@pytest.mark.parametrize(("split", "steps", "most"), [(RING, 3, 1), (EXCHANGE, 8, 4)], ids=str)
@on_devices
def test_new_masks_and_layouts_compile_nothing_once_sizes_settle(split: Split, steps: int, most: int) -> None:
    # The program is traced `most` times, and not in the last half.
    length = 48
    traces.clear()
    given, counts, placed = inputs(split.num_heads, length, length), [], None
    for step in range(steps):
        mask = packed(step, length)
        placed = split.place(mask, length, like=placed)
        check(attend(placed, given, backend=split.backend), oracle(given, mask), step)
        counts.append(len(traces))
    assert counts[steps // 2 - 1] == counts[-1] <= most, counts


COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(split: Split, gradient: bool) -> dict[str, int]:
    """The collectives of a compiled call, by kind: what crosses between devices."""
    sharded, heads = split.place(packed(0, 48), 48), split.num_heads

    def array(count: int) -> Any:
        spec = sharded.spec(split_heads=count % split.heads == 0)
        rows = 48 if sharded.route is None else sharded.route.rows.shape[1]
        placed = jax.sharding.NamedSharding(split.mesh, spec)
        return jax.ShapeDtypeStruct((BATCH, count, rows, DIM), jnp.float32, sharding=placed)

    def call(sharded: Sharded, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=sharded, backend=split.backend)

    def both(sharded: Sharded, q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(functools.partial(call, sharded), q, k, v)[1](dout)

    arrays = [array(heads[0]), array(heads[1]), array(heads[1])]
    program, arguments = (both, [*arrays, arrays[0]]) if gradient else (call, arrays)
    text = jax.jit(program).lower(sharded, *arguments).compile().as_text()
    found = [match[1] for match in COLLECTIVE.finditer(text or "")]
    return {kind: found.count(kind) for kind in sorted(set(found))}


@pytest.mark.slow
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
@on_devices
def test_nothing_is_gathered_silently(split: Split, forward: dict[str, int], backward: set[str]) -> None:
    assert collectives(split, False) == forward
    assert set(collectives(split, True)) == set(backward)
