"""DTensors on real ranks: what goes together gives what one process gives, all else an error with reasons."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from covering import few
from dtensor_jobs import DIMS, MASKS
from dtensor_plan_jobs import Planned
from worlds import world

#: Norm-wise, of float32 results.
FLOAT32 = 2e-6
PLACES = ("R", "S0", "S1", "S2", "S3")


def _attend(kind: str, cases: list[Any], ranks: int = 2, **changes: Any) -> list[Any]:
    """The results of all ranks, which must agree on whether there is one."""
    found = world(ranks).run("dtensor_jobs:attend", kind, cases, *changes.values())
    for case, *results in zip(cases, *found, strict=True):
        assert len({isinstance(x, str) for x in results}) == 1, f"{case}: {results}"
    return found[0]


def _assert_same(result: Any, case: object) -> None:
    assert not isinstance(result, str), f"{case}: {result}"
    assert result <= FLOAT32, f"{case}: {result}"


def _good(kind: str) -> set[tuple[str, ...]]:
    """The placements of q, k, v and the mask that go together."""
    per_head = kind in ("dense per head", "explicit", "spans per head")
    return {
        ("R", "R", "R", "R"),
        ("S0", "S0", "S0", "R"),
        ("S0", "S0", "S0", "S0"),
        ("S1", "S1", "S1", "R"),
        *([("S1", "S1", "S1", "S1")] if per_head else []),
    }


def test_every_placement_gives_what_one_process_gives_or_an_error() -> None:
    cases = list(itertools.product(PLACES, PLACES, PLACES, (*PLACES, "S4")))
    cases += [("P", "P", "P", "R"), ("R", "P", "R", "R"), ("R", "R", "P", "R")]
    _check(cases, _attend("spans", cases), _good("spans"))


def _check(cases: list[Any], results: list[Any], good: set[Any]) -> None:
    for case, result in zip(cases, results, strict=True):
        if case in good:
            _assert_same(result, case)
        else:
            assert isinstance(result, str), f"{case}: no error, {result} from one process"
            assert re.match(r"(Option|Shape)Error: (q|k|v|bounds|mask)\b.*: expected .*got .*\. ", result), (
                f"{case}: {result}"
            )


@pytest.mark.parametrize("kind", list(MASKS))
def test_arrays_of_masks_lie_as_q_or_whole(kind: str) -> None:
    dims = {"cache": 1, "prefix": 1, "ids": 2, "ids and lengths": 2, "groups": 2}.get(kind, 4)
    places = PLACES[: 1 + dims]
    cases = [(place,) * 3 + (at,) for place in ("R", "S0", "S1") for at in (*places, "plain")]
    cases += [("plain",) * 3 + (at,) for at in places]
    good = {case for case in cases if case in _good(kind) or (case[3] == "plain" and case[0] != "plain")}
    _check(cases, _attend(kind, cases), good)


@pytest.mark.parametrize("name", list(DIMS))
def test_options_lie_as_q_or_whole(name: str) -> None:
    ndim = 2 if name in ("alibi per row", "relative", "dropout seeds") else 1
    cases = list(itertools.product(("R", "S0", "S1"), ("plain", *PLACES[: 1 + ndim])))
    dims = {"S0": DIMS[name].get("batch"), "S1": DIMS[name].get("heads")}
    good = {case for case in cases if case[1] in ("plain", "R") or case[1] == f"S{dims.get(case[0])}"}
    for rank in world(2).run("dtensor_jobs:attend_with_option", name, cases):
        for case, result in zip(cases, rank, strict=True):
            if case in good:
                _assert_same(result, case)
            else:
                assert isinstance(result, str), f"{case}: {result}"
                assert re.match(
                    r"OptionError: (bias\.|sinks|dropout_seed).* as a DTensor: expected \[", result
                ), result


@pytest.mark.parametrize(
    ("batch", "heads", "place", "error"),
    [
        (3, (4, 2), "S0", None),
        (2, (5, 5), "S1", None),
        (2, (6, 3), "S1", "expected a multiple of 2 key heads, as so many ranks share 6 query heads, got 3"),
        (2, (4, 1), "S1", "expected a multiple of 2 key heads"),
        (2, (1, 1), "S1", "expected key heads for each of 2 ranks, got 1"),
        (1, (4, 2), "S0", "expected batch rows for each of 2 ranks, got 1"),
    ],
)
def test_uneven_parts(batch: int, heads: tuple[int, int], place: str, error: str | None) -> None:
    """A rank that holds query heads without their key heads would take those of others for them."""
    changes = {"compiled": False, "batch": batch, "heads": heads}
    for kind in ("spans", "ids"):
        (result,) = _attend(kind, [(place, place, place, "R")], **changes)
        if error is None:
            _assert_same(result, (batch, heads))
        else:
            assert re.search(f"ShapeError: q, k and v as DTensors: {error}", result), result


def test_two_mesh_axes() -> None:
    good = {("S0 S1",) * 3 + (at,) for at in ("R R", "S0 R")} | {("S0 S0",) * 3 + ("S0 S0",)}
    bad = {("S0 S1", "S1 S0", "S0 S1", "R R"), ("S0 S2",) * 3 + ("R R",), ("S0 S1",) * 3 + ("R S0",)}
    cases = sorted(good | bad)
    sizes = {"compiled": False, "batch": 4, "heads": (4, 2), "sizes": (2, 2)}
    for kind in ("spans", "ids"):
        _check(cases, _attend(kind, cases, 4, **sizes), good)


def test_compiled_programs_are_right_or_fail_too() -> None:
    good = few(sorted(_good("ids"))[::-1], 1)
    assert good[0] == ("S1", "S1", "S1", "R")
    bad = [("R", "S2", "R", "R"), ("S0", "R", "S0", "R"), ("R", "R", "R", "S0"), ("plain", "S0", "S0", "R")]
    cases = [*good, *few(bad, 2)]
    for case, result in zip(cases, _attend("ids", cases, compiled=True), strict=True):
        if case in good:
            _assert_same(result, case)
        else:
            # The compiler's own error, around ours.
            assert "as a DTensor: expected" in result or "q: expected a DTensor" in result, (
                f"{case}: {result}"
            )


def _check_planned(ranks: int, cases: list[Planned]) -> None:
    for case, *results in zip(cases, *world(ranks).run("dtensor_plan_jobs:plan_all", cases), strict=True):
        for result in results:
            assert not isinstance(result, str), f"{case}: {result}"
            assert max(result.values()) <= FLOAT32, f"{case}: {result}"


@pytest.mark.parametrize("role", ["alone", *few(["heads", "whole", "rows", "batch"], 2)])
def test_a_plan_alone_and_with_another_mesh_axis(role: str) -> None:
    base = Planned() if role == "alone" else Planned(sizes=(2, 2), role=role)
    others = [
        base,
        replace(base, layout="bshd", strategy="ulysses"),
        replace(base, strategy="ring", k_len=9),
        replace(base, option="dropout", strategy="auto"),
        # Parts of other sizes: two of three batch rows or heads on the first rank.
        replace(base, option="dropout", batch=3, heads=(3, 3)),
    ]
    options = itertools.product(DIMS, ("local", "split", "replicated"))
    others += [replace(base, option=name, place=place) for name, place in options]
    _check_planned(2 if role == "alone" else 4, others)


def test_compiled_plans() -> None:
    base = Planned(sizes=(2, 2), role="batch", compiled=True)
    heads = replace(base, role="heads")
    each = [replace(heads, option="sinks", place="split"), replace(base, option="dropout")]
    each += [replace(base, option="sinks", place="split"), replace(heads, option="dropout")]
    _check_planned(4, few(each, 1))


@pytest.mark.parametrize("role", ["heads", "batch"])
def test_plain_options_of_the_whole_are_refused_with_a_plan(role: str) -> None:
    case = Planned(sizes=(2, 2), role=role, option="alibi per row", place="whole")
    size = {"heads": 4, "batch": 2}[role]
    for results in world(4).run("dtensor_plan_jobs:plan_all", [case]):
        expected = rf"bias.slopes with .* expected that of this rank's {role}, {size // 2}, or a DTensor, got"
        assert re.search(expected, results[0]), results[0]


def test_rows_that_do_not_lie_as_the_plan_are_refused() -> None:
    cases = list(itertools.product((*PLACES, "plain"), repeat=3))
    good = {("S2", "S2", "S2"), ("plain", "plain", "plain")}
    for errors in world(2).run("dtensor_plan_jobs:misplaced", cases):
        for case, error in zip(cases, errors, strict=True):
            assert (error == "") == (case in good), f"{case}: {error or 'no error'}"
            assert not error or re.match(r"OptionError: (q|k|v)\b.*: expected .*got ", error), error
    # The last one would be rows of all four ranks, of which the plan knows two.
    some = [("R S2",) * 3, ("S0 S2",) * 3, ("S2 R",) * 3, ("R R",) * 3, ("S2 S2",) * 3]
    for errors in world(4).run("dtensor_plan_jobs:misplaced", some, (2, 2)):
        assert errors[:2] == ["", ""]
        for error in errors[2:]:
            assert "expected Shard(2) along mesh axes [1] only: the plan's ranks hold its rows" in error, (
                error
            )


@pytest.mark.parametrize(
    ("job", "ranks", "expected"),
    [
        (
            "on_other_meshes",
            4,
            {
                "k": "k as a DTensor: expected the mesh of q, DeviceMesh((dp=2, cp=2)",
                "v": "v as a DTensor: expected the mesh of q, DeviceMesh((cp=2)",
                "bounds": "bounds of the mask as a DTensor: expected the mesh of q, DeviceMesh((dp=2",
                "plan": "q as a DTensor with context parallelism: expected a mesh with the ranks",
            },
        ),
        (
            "of_other_sizes",
            2,
            {
                "rows": "q as a DTensor with context parallelism: expected 14 rows: those of 2 ranks",
                "heads": "q with context parallelism: expected 2 heads and this rank's",
                "order": "rows in the plan's order, which must be said",
                "ids": "ShapeError: segments: q_ids: expected 1 or 4 along the batch axis, got 2",
            },
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_named(job: str, ranks: int, expected: dict[str, str]) -> None:
    for errors in world(ranks).run(f"dtensor_plan_jobs:{job}"):
        assert set(errors) == set(expected)
        for name, words in expected.items():
            assert words in errors[name], errors[name]
