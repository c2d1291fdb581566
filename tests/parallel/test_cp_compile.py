"""Compiled models over ranks: one graph, no other one for another mask, checkpointing and FSDP2 as ever."""

from itertools import product

import pytest
import torch
from covering import everything, few
from samples.parallel import Case
from worlds import World, world

#: What compiled programs have of a strategy is a plan; the long run has hybrid ones too, on four ranks.
STRATEGIES = ["exchange", "ring", "ulysses"]
STRATEGIES += ["hybrid(2, 2)", "hybrid(2, 2, ring)"] if everything() else []
#: Gradients of a model in float32: sums over all rows of products of some hundred roundings.
CLOSE = 5e-6


def _ranks(strategy: str) -> int:
    return 4 if strategy.startswith("hybrid") else 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_fullgraph_at_the_first_call_of_a_fresh_process(backend: str) -> None:
    ranks = World(2)
    try:
        case = Case(option="all", heads=(4, 2), return_lse=False)
        for worst in ranks.run("compile_jobs:first_call", case, backend):
            assert worst < 1e-5
    finally:
        ranks.close()


@pytest.mark.parametrize("strategy", few(STRATEGIES, 2))  # An exchange, and what has fixed sizes.
def test_a_new_mask_and_plan_at_each_step_is_no_recompilation(strategy: str) -> None:
    case = Case(length=101, strategy=strategy, return_lse=False)
    results = world(_ranks(strategy)).run("compile_jobs:many_masks", case, 4)
    for compilations, _, worst in results:
        assert compilations == [1] * 4
        assert worst < 1e-5
    if "ring" not in strategy and strategy != "ulysses":
        assert all(len(set(received)) > 2 for _, received, _ in results), "other numbers of rows each time"


@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [
        ("exchange", True),
        ("hybrid(2, 2)", False),
        pytest.param("hybrid(2, 2)", True, marks=pytest.mark.long),
    ],
)
def test_checkpointing_keeps_attention_or_runs_it_again(strategy: str, compiled: bool) -> None:
    run, job = world(_ranks(strategy)).run, "compile_jobs:checkpointed"
    steps = {keep: run(job, strategy, keep, compiled) for keep in ("attention", "nothing")}
    steps["all"] = run(job, strategy, "all", False)
    for rank, (gradients, sent) in enumerate(steps["all"]):
        assert steps["attention"][rank][1] == sent, "selective: forward ran once"
        assert steps["nothing"][rank][1] > sent, "full: its exchange ran again"
        for keep in ("attention", "nothing"):
            for got, wanted in zip(steps[keep][rank][0], gradients, strict=True):
                assert float(wanted.norm()) > 0
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * float(wanted.norm()))


@pytest.mark.parametrize(
    ("strategy", "keep", "compiled"),
    list(product(("exchange", "hybrid(2, 2)"), ("all", "attention", "nothing"), (False, True)))
    if everything()
    else [("exchange", "attention", True), ("hybrid(2, 2)", "nothing", False), ("exchange", "all", False)],
)
def test_fsdp_around_context_parallelism_gives_the_gradients_of_one_process(
    strategy: str, keep: str, compiled: bool
) -> None:
    for error in world(_ranks(strategy)).run("compile_jobs:under_fsdp", strategy, keep, compiled):
        assert error < CLOSE


@pytest.mark.parametrize("compiled", few([True, False], 1), ids=str)
def test_models_of_other_head_counts_do_not_meet(compiled: bool) -> None:
    for errors in world(2).run("compile_jobs:two_models", compiled):
        assert max(errors) < CLOSE, errors


@pytest.mark.covering(1)
@pytest.mark.parametrize("option", few(["all", "alibi", "none"], 2))
@pytest.mark.parametrize("strategy", few(STRATEGIES, 2))
def test_the_operators_keep_torchs_contract(strategy: str, option: str) -> None:
    case = Case(strategy=strategy, option=option, length=37, heads=(4, 2))
    assert world(_ranks(strategy)).run("compile_jobs:check_operators", case) == [2] * _ranks(strategy)
