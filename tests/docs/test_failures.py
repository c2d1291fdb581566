"""The four programs of examples/failures: the usual tools still fail, and attnspan does not."""

import importlib
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from covering import covering, everything

torch = pytest.importorskip("torch")

# Inductor's own, at its first import.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

FOLDER = Path(__file__).parents[2] / "examples" / "failures"
#: The newest torch whose failures were seen here. A newer one may have mended them.
SEEN = (2, 15)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a program as Python does that runs it: its folder is the first on the path."""
    monkeypatch.syspath_prepend(FOLDER)
    known = set(sys.modules)
    yield importlib.import_module
    torch._dynamo.reset()
    for name in {"report", "task", "extension"} - known:
        sys.modules.pop(name, None)


def still_fails(failed: bool, what: str) -> None:
    """Assert that a failure of another library still happens; skip where a newer version has mended it."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not failed and version > SEEN:
        pytest.skip(f"torch {torch.__version__} has mended this: {what}")
    assert failed, what


# tests/interop/test_wrap_compile.py and tests/torch/test_compile.py show that attnspan breaks no graph.
@pytest.mark.long
def test_graph_breaks(program: Callable[[str], Any]) -> None:
    found = program("graph_breaks").main()
    for name in ("attnspan.torch.wrap(extension)", "attnspan.torch.attention"):
        assert (found[name]["graph breaks"], found[name]["recompiles"]) == ("0", "1")
    still_fails(int(found["extension, called directly"]["graph breaks"]) > 0, "a graph break at the call")
    still_fails("stride" in found["custom_op, wrong fake kernel"].get("error", ""), "an error about strides")
    still_fails("limit" in found["custom_op, right fake kernel"]["recompiles"], "recompiles up to the limit")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # As the program does.
def test_mask_functions(program: Callable[[str], Any]) -> None:
    module = program("mask_functions")
    every = list(product(module.COMPILING, module.CHECKPOINTING, (False, True)))
    # Each value of the factors; the program has all cells.
    for i in range(len(every)) if everything() else covering(every, 1):
        compiling, checkpointing, train = every[i]
        assert module.run_cell(module.spans, compiling, checkpointing, train=train) == "ok", every[i]
    traced = module.run_cell(module.WAYS["FlexAttention, functools.partial"], "around", "none", train=False)
    still_fails("signature" in traced, "a mask function that the compiler cannot trace")
    recomputed = module.run_cell(module.WAYS["FlexAttention, closure"], "around", "full", train=False)
    still_fails(recomputed != "ok", "checkpointing")


# tests/lab/bench has the timer, which leaves the first calls out.
@pytest.mark.long
def test_timing(program: Callable[[str], Any]) -> None:
    pytest.importorskip("jax")
    found = program("timing").main()
    for name, seconds in found["right"].items():
        # Compiling takes at least as long as the calls of the sample together.
        assert found["wrong: the first call is counted"][name] > 1.5 * seconds


@pytest.mark.slow
def test_segment_ids(program: Callable[[str], Any]) -> None:
    whole, shapes_only, layout = program("segment_ids").main(*([] if everything() else [2])).values()
    assert "must match" in whole
    if everything():  # tests/parallel shows that a layout keeps documents apart.
        assert sum(shapes_only[-10:]) / 10 > 0.4
        assert sum(layout[-10:]) / 10 < 0.02


@pytest.mark.long
def test_every_table_is_printed(program: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert {*program("mask_functions").main().values()} > {"ok"}
    assert "Training: forward and backward" in capsys.readouterr().out
