"""Steps on two ranks are compared with the step on one."""

import pytest
import sick_ranks
from torch_runner import lines_of

from attnspan_lab.doctor import Place
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.torch import ranks
from attnspan_lab.doctor.torch.stages import STAGES
from attnspan_lab.doctor.torch.subject import load

pytestmark = pytest.mark.filterwarnings("ignore")


def compared(factory):
    found = []
    STAGES["ranks"](load(f"sick_ranks:{factory.__name__}"), lambda **told: found.append(told["finding"]), "")
    return merged(found)


@pytest.mark.slow
@pytest.mark.parametrize("factory", sick_ranks.FAULTS)
def test_a_difference_between_ranks_has_its_line(factory):
    kind, code = sick_ranks.FAULTS[factory]
    first = compared(factory)[0]
    assert first.kind == kind
    assert first.places[0].line in lines_of(code)
    assert first.cause
    assert first.remedy


@pytest.mark.slow
def test_equal_steps_have_no_finding():
    assert compared(sick_ranks.healthy) == ()


@pytest.mark.slow
def test_a_step_without_rows_is_not_the_models_fault():
    (found,) = compared(sick_ranks.without_rows)
    assert found.kind == "error"
    assert "cannot be compared" in found.what
    assert found.remedy.startswith("Return rows['q_index'] too")


def test_a_rank_that_ends_does_not_wait():
    found = ranks._unfinished([True, False], [None, -11])
    assert (found.kind, found.evidence) == ("crash", ("rank 1: signal SIGSEGV", "rank 0: still running"))
    found = ranks._unfinished([False, False], [None, None])
    assert (found.kind, found.severity) == ("hang", "stops")


def test_parts_of_different_sizes_are_told_from_different_programs():
    def told(n, placements=()):
        return ranks._Told([ranks._Call(Place("a.py", 1), [(2, 4, n, 8)], list(placements))])

    (found,) = ranks._unlike([told(5), told(4)])
    assert "parts of different sizes" in found.cause
    (found,) = ranks._unlike([told(4, ["(Shard(dim=1),)", "(Replicate(),)"])] * 2)
    assert (found.kind, found.severity) == ("rank-placement", "slow")
