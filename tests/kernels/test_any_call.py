"""Random calls of `attention` against the oracle, and against the plain way to make the same call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from samples.problems import compare, oracle, rounding
from samples.random_calls import CORPUS, RandomCall, any_call

pytestmark = pytest.mark.compiled_module("bits are those of this machine's kernel")
#: Times what roundings explain. Tests of accuracy allow less in calls that they choose. Here few elements
#: may cancel, and wrong ones are looked for.
SLACK = 30


@pytest.mark.slow
@given(any_call())
def test_any_call(call: RandomCall) -> None:
    got, plain = call.results(), RandomCall(call.case).results()
    for name in ("out", "lse"):
        assert torch.equal(got[name], plain[name]), f"{name}: other bits than those of a plain call"
    exact, unavoidable = oracle(call.case)
    own = {n: max(torch.finfo(x.dtype).eps - torch.finfo(call.case.dtype).eps, 0) for n, x in got.items()}
    compare(got, exact, {n: SLACK * (unavoidable[n] + rounding(call.case) + own[n]) for n in got})


for row in CORPUS:
    test_any_call = example(row)(test_any_call)
