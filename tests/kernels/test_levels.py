"""Every instruction-set level that this machine can run passes the tests of the kernel."""

from pathlib import Path

import pytest
from covering import everything
from programs import run_program

from attnspan.kernels import cpu

TESTS = [
    str(Path(__file__).with_name(name))
    for name in ("test_cpu.py", "test_large_scores.py", "test_same_bits.py")
]
#: In the ordinary run the lowest level alone: options, numbers of any size, the same bits.
SOME = ("options_against and sinks", "end_of_floats", "packed_or_alone", "chunks", "lone and 12", "one_key")
SOME += ("small and 90", "flash_kernel and 1500 and fp32")
SHORT = () if everything() else ("-k", " or ".join(SOME))
OTHERS = [level for level in cpu.isa_levels() if level != cpu.isa()]
LEVELS = OTHERS if everything() else OTHERS[:1]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str) -> None:
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SHORT, *TESTS)
    assert " passed" in run_program(*command, timeout=3600, ATTNSPAN_ISA=level)


def test_an_unknown_level_is_refused_by_name() -> None:
    code = "from attnspan.kernels import cpu; cpu.isa()"
    with pytest.raises(AssertionError, match=r"(?s)ATTNSPAN_ISA.*isa_levels"):
        run_program("-c", code, ATTNSPAN_ISA="AVX2")
