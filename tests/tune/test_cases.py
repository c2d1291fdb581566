"""Which problems stand for which calls."""

from __future__ import annotations

import pytest

from attnspan.errors import OptionError
from attnspan.tune.cases import KINDS, Case, grid
from attnspan.tune.options import Options


@pytest.mark.parametrize("length", [64, 512, 1000, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kinds_mask_is_of_that_kind(kind: str, length: int) -> None:
    (case,) = grid(["forward"], ["float32"], [64], [length], [kind], heads=8)
    assert case.kind == kind
    assert case.q_len == (1 if kind == "decode" else length)


def test_the_grid_has_each_key_once_and_short_calls_first() -> None:
    cases = grid(
        ["forward", "backward"], ["float32"], [64], [1024, 900, 64], ["full", "dense", "causal"], heads=4
    )
    keys = [str(case.key("cpu", "avx2")) for case in cases]
    assert len(keys) == len(set(keys)) == 8
    assert [case.k_len for case in cases] == sorted(case.k_len for case in cases)


def test_long_calls_have_fewer_heads_but_as_many_as_two_threads_need() -> None:
    heads = [case.heads for case in grid(["forward"], ["float32"], [64], [512, 4096, 16384], ["dense"], 8)]
    assert heads == [8, 2, 2]
    assert grid(["forward"], ["float32"], [64], [16384], ["dense"], heads=1)[0].heads == 1


def test_pairs_are_those_of_one_head() -> None:
    assert Case("forward", "float32", 8, 10, 20, 64, "causal").pairs == sum(range(11, 21))
    assert Case("backward", "float32", 2, 10, 20, 64, "full").flops == 4 * 200 * 64 * 2 * 2.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "512,many"}, "--lengths: expected whole numbers with commas between, got '512,many'"),
        ({"lengths": "0"}, "lengths: expected 1 or more, got 0"),
        ({"dtypes": "float32,"}, "--dtypes: expected words with commas between"),
        ({"modes": "sideways"}, "modes: expected some of forward, backward, got sideways"),
        ({"masks": "dense,wide"}, "mask 'wide': expected one of"),
        ({"heads": 0}, "heads: expected 1 or more, got 0"),
    ],
)
def test_options_that_cannot_be_read_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options(**options).cases()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["seconds", "minutes", "threads"])
def test_options_that_must_be_positive(name: str) -> None:
    with pytest.raises(OptionError, match=f"--{name}: expected more than 0, got -1"):
        Options(**{name: -1})


def test_commas_inside_a_mask_belong_to_it() -> None:
    masks = "half, causal & window(8, 8), (documents([0, 100, 256]) | global_keys(4)), dense"
    cases = Options("float32", "64", "256", masks, "forward").cases()
    assert [case.mask for case in cases] == [
        "causal",
        "causal & window(8, 8)",
        "full",
    ], "documents are half, as causal is"
