"""Any function as a mask, inside compiled regions too: traced with the program, one graph, one compile."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from collections.abc import Callable
from functools import partial, reduce
from operator import and_

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

BATCH, HEADS, LENGTH = 2, 4, 17
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
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


def _composed(ids: Tensor) -> Predicate:
    """As FlexAttention's and_masks and or_masks make them."""
    near, parts = partial(_within, width=2), [_closure(ids), lambda b, h, q, k: q >= k]
    return lambda *at: reduce(and_, [part(*at) for part in parts]) | near(*at)


def _of_table(ids: Tensor) -> Predicate:
    """A tensor that the function captures, made inside."""
    table = ids[:, :, None] == ids[:, None, :]
    return lambda b, h, q, k: table[b, q, k]


#: Each makes a function from ids (BATCH, LENGTH), inside the compiled region.
FUNCTIONS: dict[str, Callable[[Tensor], Predicate]] = {
    "heads": lambda ids: lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k % (h + 2) != 1),
    "callable object": _Documents,
    "module": lambda ids: LEARNED,
    "composition": _composed,
    "captured table": _of_table,
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
def test_functions_made_inside_of_the_region_and_outside() -> None:
    counter, made = CompileCounterWithBackend("eager"), list(FUNCTIONS.values())
    made = made if everything() else [FUNCTIONS[name] for name in ("heads", "module", "composition")]

    @torch.compile(fullgraph=True, backend=counter)
    def run(q: Tensor, ids: Tensor, mask: Mask) -> list[Tensor]:
        # Every second one has no mask next to it.
        inside = [_attend(q, ids, make, i % 2 == 0) for i, make in enumerate(made)]
        return [*inside, attention(q, q, q, mask=mask)]

    for seed in range(2):
        ids, q = _ids(seed), _q()
        *inside, outside = run(q, ids, causal() & from_predicate(_composed(ids)))
        for i, (got, make) in enumerate(zip(inside, made, strict=True)):
            wanted = _wanted(q, ids, make, i % 2 == 0)
            _compare(got, wanted, q)
        torch.testing.assert_close(outside, _wanted(q, ids, _composed))
    assert counter.frame_count == 1, "a new mask is no new program"


@pytest.mark.parametrize("alone", [False, True])
def test_functions_in_eager_mode(alone: bool) -> None:
    for make in FUNCTIONS.values():
        ids, q = _ids(5), _q()
        _compare(_attend(q, ids, make, alone), _wanted(q, ids, make, alone), q)


@pytest.mark.slow
def test_under_activation_checkpointing_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: object) -> object:
        calls.append(1)
        return encode(*arguments)

    monkeypatch.setattr("attnspan.torch.compile.encode", counted)

    def run(q: Tensor, ids: Tensor) -> list[Tensor]:
        predicate = _closure(ids + 1)  # of an outer function
        full = checkpointed("full", lambda q: _attend(q, ids, lambda _: predicate), q)
        return [full, checkpointed("selective", lambda q, ids: _attend(q, ids, _closure), q, ids + 2)]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed, function in enumerate((compiled, compiled, run)):
        calls.clear()
        ids, q = _ids(seed), _q()
        wanted = _wanted(q, ids, _closure)
        outs = function(q, ids)
        for got in outs:
            torch.testing.assert_close(got, wanted)
        grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (torch.stack(outs), wanted)]
        torch.testing.assert_close(grads[0], 2 * grads[1], atol=1e-4, rtol=1e-4)
        # Each encodes once, and again where all is recomputed.
        assert len(calls) == 3 or function is run


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


def _noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.5


@pytest.mark.slow
def test_what_a_function_may_not_do() -> None:
    mask = from_predicate(lambda b, h, q, k: k > 0 if (q > k).any() else k > 1)
    run = torch.compile(lambda q: mask.spans(5, 7, like=q).bounds, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"(?s)Data-dependent branching.*write it with &, \| and where"):
        run(torch.zeros(1))
    host = _ids(0).numpy()
    in_steps = from_predicate(lambda b, h, q, k: host[b][q % 6] == host[b][k % 6])
    with pytest.raises(TypeError, match=r"at most 1048576 pairs.*Index all axes at once"):
        in_steps.spans(1500, 1500, batch=BATCH)


@pytest.mark.parametrize("shape", [(1, 1, 9, 17), (2, 3, 5, 64), (1, 1, 4, 0), (1, 1, 0, 4), (2, 1, 3, 1)])
def test_the_operator_encodes_runs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
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
    turned = visible.transpose(2, 3).contiguous().transpose(2, 3)
    monkeypatch.setattr("attnspan.torch.compile.CHUNK_PAIRS", 20)  # A few rows at a time.
    for encode_ in (encode_op, _encode_device):
        assert torch.equal(encode_(turned, most), encode_op(visible, most))


def test_the_operator_keeps_its_contract() -> None:
    torch.library.opcheck(encode_op, (_noise(2, 1, 9, 5).mT.expand(2, 3, 5, 9), 6))


def test_rows_with_too_many_runs() -> None:
    visible = torch.zeros(1, 1, 3, 12, dtype=torch.bool)
    visible[..., 1, ::2] = True
    visible[..., 2, 3:5] = True
    with pytest.raises(ValueError, match=r"at most max_runs=5 runs of visible keys.*, got a query with 6"):
        encode_op(visible, 5)
    bounds = _encode_device(visible, 5)[0, 0]
    assert (bounds[1] == torch.tensor([0, -1])).all()
    assert bounds[[0, 2], 0].tolist() == [[0, 0], [3, 5]]
