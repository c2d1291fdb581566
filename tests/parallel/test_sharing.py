"""Layouts that several plans share, meshes of several kinds, pipelines, decoding, loops played wrongly."""

import re
from dataclasses import replace

import pytest
from covering import few
from samples.parallel import Case
from test_parity import FLOAT32, assert_parity
from worlds import world


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", ["zigzag", "contiguous", "balanced"])
def test_the_whole_comes_back_with_its_gradient(ranks: int, method: str) -> None:
    assert world(ranks).run("sharing_jobs:gather", method) == [[]] * ranks


def test_on_two_levels_heads_are_shared_within_a_node() -> None:
    case = Case(length=101, heads=(6, 2))
    for strategy, name in (("auto", "hybrid(2, 2)"), ("exchange", "exchange"), ("hybrid(4, 1)", "ulysses")):
        results = world(4).run("sharing_jobs:two_levels", case, strategy)
        for chosen, _ in results:
            assert chosen.replace(", ring", "") == name
        assert_parity(case, [part for _, part in results])


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_dimension_of_a_mesh_is_a_world_of_its_own(strategy: str) -> None:
    case = Case(length=101, strategy=strategy)
    parts = world(4).run("sharing_jobs:part_of_a_mesh", case)
    for pair in (0, 1):
        assert_parity(replace(case), [part for part in parts if part["pair"] == pair])


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [(2, ("exchange", "exchange")), (2, ("ulysses", "exchange")), (4, ("hybrid(2, 2, ring)", "exchange"))],
)
def test_layers_of_one_layout_have_masks_and_strategies_of_their_own(
    ranks: int, strategies: tuple[str, str]
) -> None:
    assert max(world(ranks).run("sharing_jobs:layers", strategies)) < FLOAT32


def test_a_mesh_of_some_ranks_serves_these_and_refuses_others() -> None:
    for rank, found in enumerate(world(3).run("sharing_jobs:on_some_ranks", (2, 1))):
        wanted = f"OptionError: mesh: expected this rank, {rank}, among its ranks, got DeviceMesh"
        assert found == "nan: False" if rank else found.startswith(wanted), found


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_attention_between_two_layouts(ranks: int) -> None:
    assert max(world(ranks).run("sharing_jobs:encoder_and_decoder")) < FLOAT32


@pytest.mark.parametrize("strategy", few(["exchange", "ring", "ulysses"], 2))
def test_any_strides(strategy: str) -> None:
    assert max(world(2).run("sharing_jobs:strided", strategy)) < FLOAT32


def test_a_plan_of_inference_mode_serves_training() -> None:
    assert max(world(2).run("sharing_jobs:made_while_evaluating")) < FLOAT32


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_sums_of_float64_calls_are_float64(strategy: str) -> None:
    assert max(world(2).run("sharing_jobs:float64_sums", strategy)) < 1e-14


@pytest.mark.parametrize("strategy", ["exchange", "ring"])
def test_sinks_of_nothing_have_finite_gradients(strategy: str) -> None:
    assert all(world(2).run("sharing_jobs:sinks_of_nothing", strategy))


def test_dtensors_in_their_own_order_need_a_layout_that_keeps_it() -> None:
    for found in world(2).run("sharing_jobs:natural_order"):
        assert "rows in the plan's order, which must be said" in found["zigzag"]
        assert found["contiguous"] < FLOAT32


_ROWS = "PlanMismatchError: rows of plan.on(mesh, rows=...): expected rows of"
WRONG = {
    "the batch of the step before": f"{_ROWS} layout",
    "its rows in the model": "PlanMismatchError: q_index with context parallelism",
    "its rows in a compiled model": "nan: True",
    "a plan of a layout of its own": f"{_ROWS} layout",
    "the rows of another rank": f"{_ROWS} rank",
    "rows that are not sharded": "ShapeError: q with context parallelism: expected 4 heads and this rank",
    "another mask on one rank": "PlanMismatchError: context parallelism on 2 ranks",
    "DTensors in their own order": "OptionError: DTensors with context parallelism",
    "rightly": "taken",
}


@pytest.mark.parametrize("way", WRONG)
def test_the_ordinary_loop_played_wrongly_raises(way: str) -> None:
    for found in world(2).run("sharing_jobs:play", way):
        assert found.startswith(WRONG[way]), found


UNMARKED = {
    "rightly": "the same",
    "labels shifted after sharding": "losses: .* the last rows of .*: labels or targets were shifted after",
    "ids of another batch": "logits: .*batch row, token.* The mask or the ids are another batch's",
    "old tensors under new marks": "x: .* on ranks .* They are other rows of the whole: tensors of another",
    "a mean of local means": "loss: the ranks' parts add up to .* a mean of each rank's own mean",
    "gradients of one rank": r"table: it differs on ranks \[0, 1\].* Use sum_gradients",
}


@pytest.mark.parametrize("way", UNMARKED)
def test_a_step_next_to_one_rank_names_what_marks_cannot_tell(way: str) -> None:
    for found in world(2).run("sharing_jobs:same_as_one_rank", way):
        assert re.match(UNMARKED[way], found), found


@pytest.mark.parametrize(("ranks", "prefill", "split"), [(2, 0, False), (3, 61, False), (2, 50, True)])
def test_decoding_with_a_sharded_cache(ranks: int, prefill: int, split: bool) -> None:
    assert max(world(ranks).run("sharing_jobs:decode", prefill, 200, split)) < FLOAT32


def test_a_cache_refuses_what_does_not_fit_and_is_left_as_it_was() -> None:
    expected = {
        "too long": "ShapeError: ShardedCache.attend: expected at most 6 tokens, got 7",
        "heads": "ShapeError: ShardedCache.attend: k: expected (2, 2, 1, 8), got (2, 1, 1, 8)",
        "tokens": "ShapeError: ShardedCache.attend: k: expected (2, 2, 2, 8), got (2, 2, 1, 8)",
        "values": "ShapeError: ShardedCache.attend: v: expected (2, 2, 1, 8), got (2, 2, 1, 1)",
        "dtype": "DtypeError: ShardedCache.attend: k: expected torch.float32, got torch.float64",
        "sinks": "ShapeError: sinks: expected (4,), got (1,)",
        "softcap": "OptionError: softcap: expected a positive",
        "filled heads": "ShapeError: ShardedCache.fill: k: expected (2, 2, 3, 8), got (2, 1, 3, 8)",
        "filled rows": "ShapeError: ShardedCache.fill: k: expected (2, 2, 3, 8), got (2, 2, 2, 8)",
        "filled length": "ShapeError: ShardedCache.fill: q_index: expected each of the 3 tokens on one rank",
        "rightly": "nan: False",
    }
    for found in world(2).run("sharing_jobs:misuse_cache"):
        for name, (met, length) in found.items():
            assert met.startswith(expected[name]), met
            assert length == (name == "rightly"), name


def test_pipeline_stages_take_plans_as_arguments() -> None:
    assert max(world(4).run("sharing_jobs:pipeline")) < 5e-6
