"""The four programs of examples/failures: the usual tools still fail, and attnspan does not."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# Inductor's own, at its first import.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

FOLDER = Path(__file__).parents[2] / "examples" / "failures"
#: The newest torch whose failures were seen here. A newer one may have mended them.
SEEN = (2, 15)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a program as Python runs it, with its folder first on the path, and call its `main`."""
    monkeypatch.syspath_prepend(FOLDER)
    known = set(sys.modules)
    yield lambda name: importlib.import_module(name).main()
    torch._dynamo.reset()
    for name in {"report", "task", "extension"} - known:
        sys.modules.pop(name, None)


def still_fails(failed: bool, what: str) -> None:
    """Assert that a failure of another library still happens; skip where a newer version has mended it."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not failed and version > SEEN:
        pytest.skip(f"torch {torch.__version__} has mended this: {what}")
    assert failed, what


@pytest.mark.slow
def test_graph_breaks(program: Callable[[str], Any]) -> None:
    found = program("graph_breaks")
    for name in ("attnspan.torch.wrap(extension)", "attnspan.torch.attention"):
        assert (found[name]["graph breaks"], found[name]["recompiles"]) == ("0", "1")
    still_fails(int(found["extension, called directly"]["graph breaks"]) > 0, "a graph break at the call")
    still_fails("stride" in found["custom_op, wrong fake kernel"].get("error", ""), "an error about strides")
    still_fails("limit" in found["custom_op, right fake kernel"]["recompiles"], "recompiles up to the limit")


@pytest.mark.slow
def test_mask_functions(program: Callable[[str], Any]) -> None:
    found = program("mask_functions")
    ours = [result for (name, *_), result in found.items() if name == "attnspan"]
    assert ours == ["ok"] * 18
    cell = ("FlexAttention, functools.partial", "around", "none", "False")
    still_fails("signature" in found[cell], "a mask function that the compiler cannot trace")
    still_fails(found["FlexAttention, closure", "around", "full", "False"] != "ok", "checkpointing")


@pytest.mark.slow
def test_timing(program: Callable[[str], Any]) -> None:
    pytest.importorskip("jax")
    found = program("timing")
    for name, seconds in found["right"].items():
        # Compiling takes at least as long as the calls of the sample together.
        assert found["wrong: the first call is counted"][name] > 1.5 * seconds


@pytest.mark.slow
def test_segment_ids(program: Callable[[str], Any]) -> None:
    whole, shapes_only, layout = program("segment_ids").values()
    assert "must match" in whole
    assert sum(shapes_only[-10:]) / 10 > 0.4
    assert sum(layout[-10:]) / 10 < 0.01
