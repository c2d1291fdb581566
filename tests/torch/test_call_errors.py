"""Wrong calls of `attention` and of the drop-in in PyTorch: the same text eager and compiled."""

import pickle
import traceback
from typing import Any

import pytest
import torch
from covering import everything
from samples import mistakes
from samples.mistakes import Mistake, error_of, rows
from torch import Tensor, nn

import attnspan as a
from attnspan import library as lib
from attnspan.torch import _eager, attention
from attnspan.torch import scaled_dot_product_attention as sdpa


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


NAMES = {"zeros": torch.zeros, "ones": torch.ones, "ids": _ids, "arange": torch.arange, "array": torch.tensor}
NAMES = mistakes.namespace(**NAMES, torch=torch, on_meta=_on_meta, EIGHT=torch.zeros(1, 2, 8, 16))
CASES = rows(mistakes.CALLS) + rows(mistakes.TENSORS) + (DROP_IN := rows(mistakes.SDPA))


def _sdpa(given: dict[str, Any]) -> Tensor:
    return sdpa(**{**dict.fromkeys(("query", "key", "value"), NAMES["EIGHT"]), **given})


def _call(mistake: Mistake) -> Any:
    if mistake in DROP_IN:
        return eval(f"lambda: run(dict({mistake.code}))", {**NAMES, "run": _sdpa})
    return mistakes.call(mistake, attention, NAMES)


@pytest.mark.parametrize("mistake", CASES, ids=repr)
def test_a_wrong_call_says_what_how_and_why(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(_call(mistake))
    mistakes.check(error, mistake, "tensor")
    # The short way of eager calls finds nothing that the ordinary one does not.
    monkeypatch.setattr(_eager, "attend", lambda *_: None)
    other = error_of(_call(mistake))
    assert (type(other), str(other)) == (type(error), str(error))


#: In the ordinary run every second one of those that are marked.
COMPILED = [x for x in CASES if x.mark != "~"] if everything() else [x for x in CASES if x.mark == "*"][::2]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mistake", COMPILED, ids=repr)
def test_errors_are_whole_when_compiled(mistake: Mistake, dynamic: bool) -> None:
    wanted = error_of(_call(mistake))
    got = error_of(torch.compile(_call(mistake), fullgraph=True, backend="eager", dynamic=dynamic))
    # The compiler adds where the user's code is.
    assert str(got).splitlines()[0] == str(wanted)
    # The compiled kernel, which alone sees some values, knows no class of ours.
    assert isinstance(got, type(wanted)) or (type(got) is ValueError and isinstance(wanted, ValueError))


@pytest.mark.slow
def test_values_that_a_compiled_program_lacks_are_named() -> None:
    x = torch.zeros(1, 1, 4, 8)

    def attend(ids: Tensor) -> Tensor:
        return attention(x, x, x, mask=lib.tree(ids))

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert str(error_of(compiled, _ids(4) - 1)).startswith("tree: depth: expected")
    compiled = torch.compile(lambda mask: mask and a.causal(), fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(a.errors.UsageError, match=r"^bool\(Prepared\(B=1.*Write a & b or a \| b"):
        compiled(a.segments(torch.zeros(1, 9).int()).prepare(7, 9))


def _wrong(q: Tensor) -> Tensor:
    return attention(q, q, q, sinks=torch.zeros(3))


Q = torch.zeros(2, 4, 7, 16)


@pytest.mark.slow
def test_an_error_after_a_graph_break_names_the_line_and_is_caught_inside() -> None:
    @torch.compile(backend="eager")
    def model(q: Tensor) -> Any:
        return _wrong(q)

    @torch.compile(backend="eager")
    def attempt(q: Tensor) -> str:
        try:
            _wrong(q)
        except a.errors.ShapeError as error:
            return str(error)
        return ""

    assert "model" in [frame.name for frame in traceback.extract_tb(error_of(model, Q).__traceback__)]
    assert attempt(Q) == str(error_of(_wrong, Q))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recomputed", "exported", pytest.param("strict", marks=pytest.mark.long)])
def test_errors_are_whole_where_activations_are_recomputed_in_export_and_pickled(way: str) -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return _wrong(q)

    def recomputed(q: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(_wrong, q, use_reentrant=False)

    def export(q: Tensor) -> Any:
        return torch.export.export(Module(), (q,), strict=way == "strict")

    compiled = torch.compile(recomputed, fullgraph=True, backend="eager")
    got = error_of(compiled if way == "recomputed" else export, Q)
    assert str(got).splitlines()[0] == str(error_of(_wrong, Q))
    back = pickle.loads(pickle.dumps(got))
    assert type(back) is a.errors.ShapeError
    assert str(back) == str(got)


MIXING = [row.code for row in rows(mistakes.CALLS) if "**PACKED" in row.code and "bias" not in row.code]


@pytest.mark.parametrize("mixing", MIXING)
def test_packed_documents_are_kept_apart_by_documents(mixing: str) -> None:
    mask = eval(f"dict({mixing})", NAMES)["mask"] & a.documents(torch.tensor([0, 3, 8]))
    x = torch.randn(8, 2, 16)
    assert attention(x, x, x, mask=mask, layout="thd").shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    parts = [torch.randn(4, 8, 16), torch.randn(4, 5, 16)]
    jagged = torch.nested.nested_tensor([x.transpose(0, 1) for x in parts], layout=torch.jagged)
    for nested in (torch.nested.nested_tensor(parts), jagged):
        with pytest.raises(
            TypeError, match=r"q: .* got a nested tensor. Call scaled_.*x.values\(\).*documents"
        ):
            attention(nested, nested, nested)
