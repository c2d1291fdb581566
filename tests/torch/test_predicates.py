"""Any function as a mask, inside compiled regions too: traced with the program, one graph, one compile."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from collections.abc import Callable
from functools import partial, reduce
from operator import and_, or_
from typing import Any

import numpy as np
import pytest
import torch
from checkpointing import checkpointed
from covering import everything
from samples.mistaken_objects import PREDICATES
from samples.mistakes import Mistake, check, error_of, rows
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import Mask, causal, from_predicate
from attnspan.masks.encoding import encode
from attnspan.torch import attention
from attnspan.torch.compile import _encode_device, encode_op

BATCH, HEADS, LENGTH = 2, 4, 33
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _within(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor, *, width: int) -> Tensor:
    return (q - k).abs() <= width


class _Documents:
    """A callable object."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.ids[b, q] == self.ids[b, k]


class _Learned(torch.nn.Module):
    """A module with a buffer, which differs from head to head."""

    widths: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("widths", torch.arange(1, HEADS + 1))

    def forward(self, _b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= self.widths[h]


LEARNED = _Learned()


def _closure(ids: Tensor) -> Predicate:
    def same_document(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[b, q] == ids[b, k]

    return same_document


def _composed(ids: Tensor) -> Predicate:
    """As FlexAttention's and_masks and or_masks make them."""

    def combine(operator: Callable, *functions: Predicate) -> Predicate:
        def combined(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return reduce(operator, [function(b, h, q, k) for function in functions])

        return combined

    near = partial(_within, width=2)
    return combine(or_, combine(and_, _closure(ids), lambda b, h, q, k: q >= k), near)


def _of_dense(ids: Tensor) -> Predicate:
    """A tensor that the function captures, made inside."""
    table = ids[:, :, None] == ids[:, None, :]
    return lambda b, h, q, k: table[b, q, k]


#: Each makes a function from ids (BATCH, LENGTH), inside the compiled region.
FUNCTIONS: dict[str, Callable[[Tensor], Predicate]] = {
    "closure": _closure,
    "lambda": lambda ids: lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k % (h + 2) != 1),
    "partial": lambda ids: partial(_within, width=4),
    "partial of a closure": lambda ids: partial(lambda b, h, q, k, ids: ids[b, q] == ids[b, k], ids=ids),
    "callable object": _Documents,
    "module": lambda ids: LEARNED,
    "composition": _composed,
    "captured table": _of_dense,
}


def _ids(seed: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (BATCH, length), generator=generator).cumsum(-1) // 3


def _q(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, HEADS, length, 16, requires_grad=True)


def _attend(q: Tensor, ids: Tensor, make: Callable[[Tensor], Predicate], alone: bool = False) -> Tensor:
    mask = from_predicate(make(ids), max_runs=12)
    return attention(q, q, q, mask=mask if alone else causal() & mask)


def _wanted(q: Tensor, ids: Tensor, make: Callable[[Tensor], Predicate], alone: bool = False) -> Tensor:
    """What the function says, pair by pair, in plain torch."""
    b, h, i, j = (torch.arange(n) for n in (BATCH, HEADS, LENGTH, LENGTH))
    visible = make(ids)(b[:, None, None, None], h[:, None, None], i[:, None], j)
    visible = visible.expand(BATCH, HEADS, LENGTH, LENGTH)
    visible = visible if alone else visible.tril()
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=visible)


def _compare(got: Tensor, wanted: Tensor, q: Tensor) -> None:
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(x.square().sum(), q, retain_graph=True)[0] for x in (got, wanted)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_functions_made_inside_the_compiled_region() -> None:
    # "composition" holds the others. Every second one has no mask next to it.
    names = [x for x in FUNCTIONS if everything() or x not in ("closure", "lambda", "partial")]
    made = [(FUNCTIONS[name], i % 2 == 0) for i, name in enumerate(names)]
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, ids: Tensor) -> list[Tensor]:
        return [_attend(q, ids, make, alone) for make, alone in made]

    for seed in range(2):
        ids, q = _ids(seed), _q()
        for got, (make, alone) in zip(run(q, ids), made, strict=True):
            _compare(got, _wanted(q, ids, make, alone), q)
    assert counter.frame_count == 1, "a new mask is no new program"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_in_eager_mode(name: str) -> None:
    make, ids, q = FUNCTIONS[name], _ids(5), _q()
    for alone in (False, True):
        _compare(_attend(q, ids, make, alone), _wanted(q, ids, make, alone), q)


@pytest.mark.slow
def test_masks_made_outside_and_handed_in() -> None:
    counter = CompileCounterWithBackend("eager")
    names = ["closure", "partial", "module"]

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, masks: list[Mask]) -> list[Tensor]:
        return [attention(q, q, q, mask=mask) for mask in masks]

    for seed in range(2):
        ids, q = _ids(seed), _q()
        masks = [causal() & from_predicate(FUNCTIONS[name](ids)) for name in names]
        for got, name in zip(run(q, masks), names, strict=True):
            torch.testing.assert_close(got, _wanted(q, ids, FUNCTIONS[name]))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_under_activation_checkpointing_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: object) -> object:
        calls.append(1)
        return encode(*arguments)

    monkeypatch.setattr("attnspan.torch.compile.encode", counted)

    def block(q: Tensor, ids: Tensor) -> Tensor:
        return _attend(q, ids, _closure)

    def run(q: Tensor, ids: Tensor) -> list[Tensor]:
        predicate = _closure(ids + 1)  # of an outer function
        outer = checkpointed("full", lambda q: _attend(q, ids, lambda _: predicate), q)
        full = checkpointed("full", block, q, ids)
        return [outer, full, checkpointed("selective", block, q, ids + 2)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed, function in enumerate((compiled, compiled, run)):
        calls.clear()
        ids, q = _ids(seed), _q()
        wanted = _wanted(q, ids, _closure)
        outs = function(q, ids)
        for got in outs:
            torch.testing.assert_close(got, wanted)
        grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (torch.stack(outs), wanted)]
        torch.testing.assert_close(grads[0], 3 * grads[1], atol=1e-4, rtol=1e-4)
        # Each encodes once, and again where all is recomputed.
        assert len(calls) == 5 or function is run


def test_export_keeps_the_operator() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, ids: Tensor) -> Tensor:
            return _attend(q, ids, _closure)

    ids, q = _ids(1), _q().detach()
    program = torch.export.export(Block(), (q, ids))
    assert sum(node.target is encode_op for node in program.graph.nodes) == 1
    other = _ids(2)
    torch.testing.assert_close(program.module()(q, other), Block()(q, other))


def _raises(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    raise KeyError("no such document")


_TABLE = torch.zeros(2, 5, dtype=torch.long)


# test_call_errors.py has some in compiled code.
@pytest.mark.parametrize("mistake", rows(PREDICATES), ids=repr)
def test_what_is_no_mask_function_is_named(mistake: Mistake) -> None:
    fn = eval(mistake.code, globals())
    error = error_of(lambda: from_predicate(fn).spans(5, 7, like=torch.zeros(1)))
    check(error, mistake)
    # What the function itself raised is the cause.
    assert " raised " not in mistake.text or error.__cause__ is not None


@pytest.mark.slow
def test_control_flow_on_indices_in_a_compiled_region_names_the_remedy() -> None:
    mask = from_predicate(lambda b, h, q, k: k > 0 if (q > k).any() else k > 1)
    run = torch.compile(lambda q: mask.spans(5, 7, like=q).bounds, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"(?s)Data-dependent branching.*write it with &, \| and where"):
        run(torch.zeros(1))


def _noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.5


@pytest.mark.parametrize("shape", [(1, 1, 9, 17), (2, 3, 5, 64), (1, 1, 4, 0), (1, 1, 0, 4), (2, 1, 3, 1)])
def test_the_operator_encodes_runs(shape: tuple[int, ...]) -> None:
    visible = _noise(*shape)
    starts = visible & ~torch.nn.functional.pad(visible, (1, 0))[..., :-1]
    most = max(int(starts.sum(-1).max()) if starts.numel() else 0, 1)
    for runs in (most, most + 3):
        bounds = encode_op(visible, runs)
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        keys = torch.arange(shape[-1])
        inside = (keys >= bounds[..., :1]) & (keys < bounds[..., 1:])
        assert torch.equal(inside.any(-2), visible)
        assert inside.sum(-2).max() <= 1 if inside.numel() else True
        # The kernel for devices, which does not wait, gives the same spans.
        assert torch.equal(_encode_device(visible, runs), bounds)


def test_the_operator_takes_any_strides_and_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    strided = _noise(2, 1, 9, 5).transpose(2, 3).expand(2, 3, 5, 9)
    torch.library.opcheck(encode_op, (strided, 6))
    assert torch.equal(encode_op(strided, 6), encode_op(strided.contiguous(), 6))
    assert torch.equal(encode_op(strided, 6), _encode_device(strided, 6))
    visible = _noise(2, 2, 11, 20)
    wanted = encode_op(visible, 10)
    monkeypatch.setattr("attnspan.torch.compile.CHUNK_PAIRS", 200)
    assert torch.equal(encode_op(visible, 10), wanted)
    assert torch.equal(_encode_device(visible, 10), wanted)


def test_rows_with_too_many_runs() -> None:
    visible = torch.zeros(1, 1, 3, 12, dtype=torch.bool)
    visible[..., 1, ::2] = True
    visible[..., 2, 3:5] = True
    with pytest.raises(ValueError, match=r"at most max_runs=5 runs of visible keys.*, got a query with 6"):
        encode_op(visible, 5)
    bounds = _encode_device(visible, 5)[0, 0]
    assert (bounds[1] == torch.tensor([0, -1])).all()
    assert bounds[[0, 2], 0].tolist() == [[0, 0], [3, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 8])
def test_functions_that_index_in_steps(batch: int) -> None:
    """Eight batch rows hold every row number of the queries, so that no index is out of bounds."""
    ids = torch.randint(0, 2, (batch, 6))
    q, q_index = torch.randn(batch, 2, 6, 8), torch.randint(0, 6, (batch, 6))
    in_steps = from_predicate(lambda b, _, q, k: ids[b][q] == ids[b][k])
    at_once = from_predicate(lambda b, _, q, k: ids[b, q] == ids[b, k])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for index in (None, q_index):
        wanted = attention(q, q, q, mask=at_once, q_index=index)
        assert torch.equal(attention(q, q, q, mask=in_steps, q_index=index), wanted)
        if everything() or (index is None) == (batch == 2):
            assert torch.equal(compiled(q, q, q, mask=in_steps, q_index=index), wanted)
    host = ids.numpy()
    found = from_predicate(lambda b, _, q, k: host[b][q] == host[b][k]).spans(6, 6, batch=batch)
    assert (found.dense() == at_once.spans(6, 6, batch=batch, like=q).dense().numpy()).all()
    with pytest.raises(TypeError, match=r"at most 1048576 pairs.*Index all axes at once"):
        from_predicate(lambda b, _, q, k: host[b][q % 6] == host[b][k % 6]).spans(1500, 1500, batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("array", ["torch", "numpy", "jax"])
def test_functions_that_reduce_are_asked_for_single_pairs(array: str) -> None:
    """FlexAttention calls a mask function with numbers of one pair, so that ``ids[b].sum()`` is one sum."""
    lengths = torch.tensor([[2, 1, 1, 0], [1, 1, 1, 0], [0, 1, 0, 1]])
    given: Any = lengths
    mean: Any = lengths.float()
    if array != "torch":
        convert = np.asarray if array == "numpy" else pytest.importorskip("jax.numpy").asarray
        given, mean = convert(lengths.numpy()), convert(mean.numpy())
    exact = torch.arange(4) < lengths.sum(-1)[:, None]
    functions = {
        "sum of a row": lambda b, h, q, k: k < given[b].sum(),
        "beside others": lambda b, h, q, k: k < given[b].sum() - 0 * q,
        "largest of all": lambda b, h, q, k: (
            (q >= k) & (k <= 3 * (mean[b].max() >= 1)) & (k < given[b].sum())
        ),
    }
    for name, function in functions.items():
        like = None if array == "numpy" else given
        found = from_predicate(function).spans(4, 4, batch=3, heads=2, like=like).dense()
        wanted = exact[:, None, None].expand(3, 2, 4, 4)
        if name == "largest of all":
            wanted = wanted & torch.ones(4, 4, dtype=torch.bool).tril()
        assert (np.broadcast_to(np.asarray(found), (3, 2, 4, 4)) == wanted.numpy()).all(), name
