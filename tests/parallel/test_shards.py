"""Rows are dealt out and come back, on meshes of one and two levels and on a part of one."""

from dataclasses import replace

import pytest
import torch
from parity_cases import OPTIONS, Case
from test_parity import PARTITIONS, WORLDS, assert_parity
from worlds import world


@pytest.mark.parametrize("method", PARTITIONS)
@pytest.mark.parametrize("length", [1, 2, 37, 101])
def test_rows_come_back_with_the_gradients_of_all_ranks(length: int, method: str) -> None:
    ranks = 3
    parts = world(ranks).run("shard_jobs:round_trip", Case(length=length, partition=method, batch=1))
    for part in parts:
        whole = part["whole"]
        assert torch.equal(part["back"], whole)
        assert torch.equal(part["last"], whole)
        assert part["positions"].dtype == torch.int64
        valid, positions = part["valid"], part["positions"]
        assert torch.equal(part["local"][:, valid], whole[:, positions[valid]])
        # Each rank's loss is (rank + 1) times the sum of squares: together 1 + 2 + 3 of them.
        assert torch.equal(part["gradient"][:, valid], 12 * whole[:, positions[valid]])
        assert (part["gradient"][:, ~valid] == 0).all()
        batch = part["batch"]
        assert torch.equal(batch["tokens"][0, valid], positions[valid])
        fills = {"tokens": 0, "ids": -1, "targets": -100, "weights": 0}
        for name, fill in fills.items():
            assert (batch[name][:, ~valid] == fill).all(), name
            assert torch.equal(batch[name], part["own"][name]), "a data loader needs no group"
    assert sum(int(part["valid"].sum()) for part in parts) == length


@pytest.mark.parametrize("option", ["none", "all"])
@pytest.mark.parametrize(("ranks", "strategy"), WORLDS)
def test_attention_takes_it_for_a_mask(ranks: int, strategy: str, option: str) -> None:
    assert option in OPTIONS
    case = Case(strategy=strategy, option=option, layout="bshd")
    assert all(world(ranks).run("shard_jobs:as_mask", case))


def test_on_two_levels_heads_are_shared_out_within_a_node() -> None:
    case = Case(length=101, heads=(6, 2))
    for strategy, name in (("auto", "hybrid(2, 2)"), ("exchange", "exchange"), ("hybrid(4, 1)", "ulysses")):
        results = world(4).run("shard_jobs:two_levels", case, strategy)
        for chosen, _ in results:
            assert chosen.removesuffix(", ring)").removesuffix(")") == name.removesuffix(")")
        assert_parity(case, [part for _, part in results])


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_dimension_of_a_mesh_is_a_world_of_its_own(strategy: str) -> None:
    case = Case(length=101, strategy=strategy)
    parts = world(4).run("shard_jobs:part_of_a_mesh", case)
    for pair in (0, 1):
        assert_parity(replace(case), [part for part in parts if part["pair"] == pair])
