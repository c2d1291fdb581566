"""What a model sees of context parallelism: rows, refusals, the switch. For results, test_parity.py."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from worlds import world

from attnspan import alibi, causal, dense_bias, full, segments, window
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.parallel import ContextParallel, Strategy
from attnspan.torch import attention

Q_LEN, HEADS = 37, (4, 2)
Meshes = Callable[..., DeviceMesh]


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    """Meshes of ranks of which only one is real: enough where nothing depends on what is exchanged."""

    def start(*sizes: int, rank: int = 0, named: bool = True) -> DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(sizes)))
        names = ("node", "inter", "intra")[-len(sizes) :]
        return init_device_mesh("cpu", sizes, mesh_dim_names=names if named else None)

    yield start
    dist.destroy_process_group()


def make(mesh: DeviceMesh, **changes: Any) -> ContextParallel:
    keywords = {"mask": causal(), "q_len": Q_LEN, "heads": HEADS, "strategy": "exchange", "method": "zigzag"}
    return ContextParallel(mesh, **{**keywords, **changes})


def tensors(rows: int, keys: int | None = None, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    keys = rows if keys is None else keys
    shapes = [(1, 4, rows, 16), (1, 2, keys, 16), (1, 2, keys, 16)]
    return tuple(torch.randn(shape, **changes) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("rank", range(4))
def test_rows_positions_and_padding_of_a_rank(meshes: Meshes, rank: int) -> None:
    cp = make(meshes(4, rank=rank), rows_per_chunk=2)
    rows = cp.partition.rows[rank]
    assert cp.rank == rank
    assert cp.rows_per_rank == cp.keys_per_rank == len(rows) == 10
    assert cp.valid.dtype == torch.bool
    assert cp.valid.tolist() == (rows >= 0).tolist()
    assert cp.positions.dtype == torch.int64
    assert cp.positions.tolist() == np.maximum(rows, 0).tolist()
    whole = torch.arange(1, Q_LEN + 1)
    for dim, x in ((0, whole), (-1, whole[None]), (1, whole[None, :, None].expand(2, -1, 3))):
        got = cp.shard(x, dim=dim)
        by_row = got.movedim(dim, 0).reshape(len(rows), -1)
        assert torch.equal(by_row, torch.from_numpy(rows + 1)[:, None].expand_as(by_row).long())
        assert torch.equal(cp.shard_keys(x, dim=dim), got)
    assert cp.shard(whole, dim=0, fill=-5)[~cp.valid].eq(-5).all()


def test_padding_of_a_batch_is_named_by_what_it_is(meshes: Meshes) -> None:
    cp = make(meshes(4), rows_per_chunk=2, method="contiguous")
    assert (~cp.valid).any(), "there is padding to look at"
    names = ("tokens", "ids", "segment_ids", "labels", "targets", "weights")
    batch = cp.shard({name: torch.ones(2, Q_LEN, dtype=torch.int64) for name in names})
    found = {name: set(x[:, ~cp.valid].flatten().tolist()) for name, x in batch.items()}
    assert found == {
        "tokens": {0},
        "ids": {-1},
        "segment_ids": {-1},
        "labels": {-100},
        "targets": {-100},
        "weights": {0},
    }


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses", "auto"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_one_line_switches(meshes: Meshes, strategy: str, layout: str) -> None:
    mask = causal() & segments(np.repeat([0, 1, 2], [9, 4, 24]))
    cp = make(meshes(1), mask=mask, strategy=strategy)
    x = [cp.shard(x, dim=2) for x in tensors(Q_LEN)]
    if layout != "bhsd":
        x = [part.transpose(1, 2) for part in x]
    if layout == "thd":
        x = [part[0] for part in x]
    options: dict[str, Any] = {
        "bias": alibi(torch.rand(4)),
        "sinks": torch.rand(4),
        "softcap": 2.0,
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor(3),
        "layout": layout,
        "return_lse": True,
    }
    got, wanted = (attention(*x, mask=each, **options) for each in (cp, mask))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(cp.attention(*x, **options), got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_without_keys_the_output_is_nothing(meshes: Meshes, strategy: str) -> None:
    cp = make(meshes(1), mask=full(), k_len=0, strategy=strategy)
    x = [x.requires_grad_() for x in tensors(Q_LEN, 0)]
    out = cp.attention(*x)
    out.sum().backward()
    assert out.shape == (1, 4, Q_LEN, 16)
    assert not out.any()
    assert not x[0].grad.any()
    assert x[1].grad.shape == (1, 2, 0, 16)


def test_keys_of_cross_attention(meshes: Meshes) -> None:
    cp = make(meshes(3, rank=1), mask=window(5, 5), k_len=10, strategy="ring")
    assert (cp.q_len, cp.k_len, cp.keys_per_rank) == (Q_LEN, 10, 4)
    assert cp.shard_keys(torch.arange(10), dim=0).tolist() == [4, 5, 6, 7]
    assert cp.attention(*tensors(cp.rows_per_rank, 4)).shape == (1, 4, cp.rows_per_rank, 16)
    with pytest.raises(
        ShapeError, match="k with context parallelism: expected 2 heads and this rank's 4 rows"
    ):
        cp.attention(*tensors(cp.rows_per_rank))
    with pytest.raises(ShapeError, match="expected 10 rows along dimension 0"):
        cp.shard_keys(torch.arange(Q_LEN), dim=0)


def test_the_mask_of_the_next_step_keeps_the_strategy(meshes: Meshes) -> None:
    cp = make(meshes(4), mask=full(), strategy="auto", rows_per_chunk=2)
    other = causal() & segments(np.repeat(np.arange(Q_LEN), 1))
    after = cp.with_mask(other)
    assert after.strategy == cp.strategy
    assert after.choice is None
    assert after.rows_per_rank == cp.rows_per_rank, "shapes stay"
    assert after.digest["mask"] != cp.digest["mask"]
    assert (after.digest["strategy"], after.digest["heads"]) == (cp.digest["strategy"], cp.digest["heads"])
    assert after.plan.rows.size == 2, "and so do the other options"
    fresh = make(cp.mesh, mask=other, strategy="auto", rows_per_chunk=2)
    assert fresh.strategy != cp.strategy, "a new one would have chosen otherwise"


def test_the_mask_of_the_next_step_may_have_another_length(meshes: Meshes) -> None:
    mesh = meshes(4)
    after = make(mesh).with_mask(causal(), q_len=81)
    assert (after.q_len, after.k_len) == (81, 81)
    assert after.shard(torch.arange(81), dim=0).shape == (after.rows_per_rank,)
    crossed = make(mesh, mask=full(), k_len=9).with_mask(full(), q_len=81)
    assert (crossed.q_len, crossed.k_len) == (81, 9)


def test_what_it_says_of_itself(meshes: Meshes) -> None:
    cp = make(meshes(4), strategy="hybrid(2, 2, ring)")
    assert repr(cp) == (
        "ContextParallel(hybrid(2, 2, ring) on 4 ranks, q_len=37, k_len=37, heads=(4, 2), rows_per_rank=10)"
    )
    assert sorted(cp.digest) == ["heads", "mask", "partition", "strategy"]


def test_two_levels_share_out_heads_within_a_node_only(meshes: Meshes) -> None:
    mesh = meshes(2, 4)
    names = {
        make(mesh, strategy="auto", mask=mask).strategy.members for mask in (causal(), full(), window(1))
    }
    assert names == {4}
    assert make(mesh, strategy="exchange").strategy == Strategy("exchange", 1, 8), "unless told otherwise"


HEADS_REFUSED = [(4, 3), (0, 0), (-4, -2), 4, [4, 2], (4.0, 2), (4,), (True, True), None]


@pytest.mark.parametrize("heads", HEADS_REFUSED, ids=str)
def test_heads_that_are_none(meshes: Meshes, heads: Any) -> None:
    with pytest.raises(OptionError) as caught:
        make(meshes(2), heads=heads)
    message = str(caught.value)
    assert "expected (query heads, key heads), the second a divisor of the first" in message
    assert repr(heads) in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_len": 37.0}, r"q_len: expected an int, got 37\.0"),
        ({"k_len": "9"}, "k_len: expected an int, got '9'"),
        ({"dtype": "bf16"}, r"dtype: expected a torch\.dtype, got 'bf16'"),
    ],
    ids=["q_len", "k_len", "dtype"],
)
def test_types_that_do_not_fit(meshes: Meshes, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DtypeError, match=message):
        make(meshes(2), **changes)


def test_what_is_decided_already_is_not_decided_again(meshes: Meshes) -> None:
    mesh = meshes(2)
    part = make(mesh, strategy="exchange").partition
    for extra in ({"method": "zigzag"}, {"rows_per_chunk": 3}, {"tolerance": 1.1}):
        with pytest.raises(OptionError, match="partition: expected it alone"):
            make(mesh, partition=part, **{"method": "balanced", **extra})
    with pytest.raises(OptionError, match="keys: expected k_len beside it"):
        make(mesh, keys=part)
    with pytest.raises(ShapeError, match=r"partition: expected .* over 1 groups of 2, as ulysses needs"):
        make(mesh, partition=part, method="balanced", strategy="ulysses")
    assert make(mesh, partition=part, method="balanced", strategy="auto").strategy.name in (
        "exchange",
        "ring",
    )


@pytest.mark.parametrize("strategy", ["exchange", "auto"])
def test_the_tolerance_reaches_the_partition(meshes: Meshes, strategy: str) -> None:
    with pytest.raises(OptionError, match=r"tolerance: expected at least 1, got 0\.9"):
        make(meshes(2), strategy=strategy, tolerance=0.9)


def test_meshes_that_are_none(meshes: Meshes) -> None:
    mesh = meshes(1, 2, 2)
    with pytest.raises(OptionError, match=r"expected one dimension, or two.*got 3\. Take the dimension"):
        make(mesh)
    for other in (4, None, dist.group.WORLD):
        with pytest.raises(DtypeError, match="expected a DeviceMesh, such as mesh\\['cp'\\]"):
            make(other)  # type: ignore[arg-type]


def test_two_levels_need_names(meshes: Meshes) -> None:
    with pytest.raises(OptionError, match=r"names .*mesh_dim_names"):
        make(meshes(2, 2, named=False))
    dist.destroy_process_group()
    assert make(meshes(2, named=False)).strategy.ranks == 2


def test_a_mask_of_another_length(meshes: Meshes) -> None:
    mesh = meshes(2)
    with pytest.raises(ShapeError, match="expected 37 rows and 37 keys, the whole problem"):
        make(mesh, mask=causal().prepare(36, 36))
    # What a shard-sized mask would be: the mistake that gave wrong losses elsewhere.
    with pytest.raises(ShapeError, match="expected arrays that describe 37 keys, got 19"):
        make(mesh, mask=segments(torch.zeros(19, dtype=torch.int64)))


Inputs = dict[str, Tensor]
#: What is changed of a call that fits, the error and a part of its message.
CALLS: dict[str, tuple[dict[str, Any] | Callable[[Inputs], dict[str, Any]], type[Exception], str]] = {
    "q_index": (
        {"q_index": torch.arange(10)},
        OptionError,
        "q_index with context parallelism: expected None, got Tensor",
    ),
    "k_index": ({"k_index": torch.arange(10)}, OptionError, "k_index with context parallelism"),
    "backend": ({"backend": "math"}, OptionError, "backend with context parallelism: expected None, got str"),
    "rows": (
        lambda x: {"q": x["q"][:, :, :9]},
        ShapeError,
        "q with .* this rank's 10 rows, padding included",
    ),
    "all rows": (
        lambda x: {"q": x["q"].repeat(1, 1, 4, 1)[:, :, :37]},
        ShapeError,
        r"got shape \(1, 4, 37, 16\) in layout bhsd. Shard the model's inputs by cp.shard",
    ),
    "heads": (lambda x: {"q": x["q"][:, :2]}, ShapeError, "q with context parallelism: expected 4 heads"),
    "key heads": (
        lambda x: {"k": x["k"][:, :1], "v": x["v"][:, :1]},
        ShapeError,
        "k with context parallelism: expected 2 heads",
    ),
    "keys": (
        lambda x: {"k": x["k"][:, :, :9], "v": x["v"][:, :, :9]},
        ShapeError,
        "k with context parallelism: expected 2 heads and this rank's 10 rows",
    ),
    "values": (lambda x: {"v": x["v"][:, :, :9]}, ShapeError, r"v \(1, 2, 9, 16\)"),
    "layout": ({"layout": "hbsd"}, OptionError, "expected one of bhsd, bshd, thd"),
    "another layout": ({"layout": "bshd"}, ShapeError, "q with context parallelism"),
    "dtypes": (lambda x: {"k": x["k"].bfloat16()}, DtypeError, "expected one dtype"),
    "sinks": ({"sinks": torch.zeros(3)}, ShapeError, r"sinks: expected \(4,\)"),
    "slopes of a shard": ({"bias": alibi(torch.zeros(2))}, ShapeError, "alibi.*4"),
    "dropout without seed": ({"dropout_p": 0.1}, OptionError, "dropout_seed"),
    "seed": ({"dropout_p": 0.1, "dropout_seed": 3}, DtypeError, "dropout_seed: expected an integer tensor"),
    "scale": ({"scale": float("nan")}, OptionError, "scale"),
    "bias of the whole": ({"bias": torch.zeros(37, 37)}, OptionError, "bias with .* got a dense bias"),
    "bias of a shard": ({"bias": torch.zeros(10, 10)}, OptionError, "bias with .* got a dense bias"),
    "named": ({"bias": dense_bias(torch.zeros(37, 37))}, OptionError, "bias with .* got a dense bias"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_attention_refuses(meshes: Meshes, name: str) -> None:
    cp = make(meshes(4), strategy="ring")
    x = dict(zip("qkv", tensors(10), strict=True))
    change, kind, message = CALLS[name]
    changed = {**x, **(change(x) if callable(change) else change)}
    assert cp.attention(**x).shape == (1, 4, 10, 16), "what is refused is the change"
    with pytest.raises(kind, match=message):
        cp.attention(**changed)
    with pytest.raises(kind, match=message):
        attention(**changed, mask=cp)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_per_batch_row_is_for_so_many_rows(meshes: Meshes, batch: int) -> None:
    ids = np.repeat([[0, 1], [2, 3]], [9, 28], axis=1)
    cp = make(meshes(4), mask=segments(ids), batch=2, strategy="ring")
    inputs = [x.expand(batch, -1, -1, -1) for x in tensors(cp.rows_per_rank)]
    with pytest.raises(ShapeError, match=f"expected 2 batch rows, as the mask has, got {batch}"):
        cp.attention(*inputs)


def test_rows_of_another_length_are_not_dealt_or_gathered(meshes: Meshes) -> None:
    cp = make(meshes(4))
    with pytest.raises(ShapeError, match="expected 37 rows along dimension 1"):
        cp.shard(torch.zeros(1, 36))
    for dim, x in ((1, torch.zeros(1, 9)), (0, torch.zeros(1, 10)), (2, torch.zeros(1, 10))):
        with pytest.raises(ShapeError, match=f"this rank's 10 rows along dimension {dim}"):
            cp.unshard(x, dim=dim)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["exchange", "ulysses"])
@pytest.mark.parametrize("method", ["zigzag", "contiguous"])
def test_unshard_and_its_gradient(ranks: int, strategy: str, method: str) -> None:
    assert world(ranks).run("context_jobs:gather", strategy, method) == [[]] * ranks


def test_the_strategy_of_a_run_stays_on_real_ranks() -> None:
    ranks = world(2).run("context_jobs:next_steps")
    assert all(steps == ranks[0] for steps in ranks)
    assert len({name for name, _, _ in ranks[0]}) == 1
    assert all(whole for _, _, whole in ranks[0])


PLAIN = """
import sys
import attnspan.parallel
from attnspan.parallel import Partition, Strategy
from attnspan.parallel import chunks, choose, local, needs, partition, plan, planning, strategy, traffic
from attnspan import causal
plan.Plan  # what is planned in a data loader needs no framework
planning.make_plan(causal().prepare(64, 64), planning.Request(4, choose.Call(4, 2)))
print(sorted({"torch", "jax"} & set(sys.modules)), "ContextParallel" in attnspan.parallel.__all__)
from attnspan.parallel import ContextParallel
print("torch" in sys.modules, ContextParallel.__name__)
"""


def test_planning_loads_no_framework() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] True", "True ContextParallel"]


def test_a_name_that_is_not_there() -> None:
    import attnspan.parallel

    with pytest.raises(AttributeError, match=r"'attnspan\.parallel' has no attribute 'Contexts'"):
        attnspan.parallel.Contexts  # noqa: B018
