"""{attention alone, compile alone, both} x checkpointing x every mask: equal results, counted calls."""

from itertools import product

import pytest
import torch
from checkpointing import FORWARD_CALLS, checkpointed
from closeness import relative_error
from covering import cells, few
from samples import K_LEN, MASKS, Q_LEN, counted_kernel_calls
from torch import Tensor, nn

from attnspan import Mask
from attnspan.torch import attention

WIDTH, HEADS, KV_HEADS = 32, 4, 2

#: (with attention, compiled). "compile alone" is the same block with the attention taken out.
MODES = {"attention": (True, False), "compile": (False, True), "both": (True, True)}


class Block(nn.Module):
    def __init__(self, attend: bool) -> None:
        super().__init__()
        self.attend = attend
        dim = WIDTH // HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (HEADS + 2 * KV_HEADS, -1))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        mixed = attention(q, k, v, mask=mask, layout="bshd") if self.attend else q.sin()
        return x + self.out(mixed.flatten(2))  # type: ignore[no-any-return]


class Model(nn.Module):
    """One block under one kind of activation checkpointing."""

    def __init__(self, attend: bool, ac: str) -> None:
        super().__init__()
        self.block, self.ac = Block(attend), ac

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return checkpointed(self.ac, self.block, x, mask)  # type: ignore[no-any-return]


def _run(
    mode: str, ac: str, mask: Mask, backend: str = "aot_eager", compiled: bool | None = None
) -> tuple[list[Tensor], list[str]]:
    attend, compile_it = MODES[mode]
    torch.manual_seed(0)
    model = Model(attend, ac)
    x = torch.randn(2, Q_LEN, WIDTH, requires_grad=True)
    if compile_it if compiled is None else compiled:
        model.compile(fullgraph=True, backend=backend)
    with counted_kernel_calls() as calls:
        out = model(x, mask)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], calls


def _mask(name: str) -> Mask:
    return MASKS[name]().prepare(Q_LEN, K_LEN, batch=2, heads=HEADS, like=torch.empty(0))


def _assert_cell(mode: str, ac: str, mask: Mask, backend: str = "aot_eager") -> None:
    got, calls = _run(mode, ac, mask, backend)
    wanted, _ = _run(mode, "none", mask, compiled=False)
    attend, _ = MODES[mode]
    assert calls.count("forward") == (FORWARD_CALLS[ac] if attend else 0)
    assert calls.count("backward") == (1 if attend else 0)
    for a, b in zip(got, wanted, strict=True):
        # Sums over at most BATCH * Q_LEN * WIDTH products, in another order: a few roundings each.
        assert relative_error(a, b) <= 16 * torch.finfo(torch.float32).eps


CELLS = [(mode, ac, name) for mode in MODES for ac in FORWARD_CALLS for name in MASKS]


# Masks come prepared, so that a mask is no more than its spans to either factor: each has one cell.
@pytest.mark.parametrize(("kind", "name"), cells(product(MODES, FORWARD_CALLS), MASKS, strength=1), ids=str)
def test_cell(kind: tuple[str, str], name: str) -> None:
    _assert_cell(*kind, _mask(name))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # imported by inductor
@pytest.mark.parametrize("ac", few(["selective", "none", "full"], 1))
def test_cell_under_inductor(ac: str) -> None:
    _assert_cell("both", ac, _mask("segments"), backend="inductor")


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # from torch 2.15 on
def test_cells_are_distinct() -> None:
    assert len(set(CELLS)) == len(MODES) * len(FORWARD_CALLS) * len(MASKS)
    assert len(set(MODES.values())) == len(MODES)
    # No two masks show the same pairs, so no two columns are one.
    pictures = {name: _mask(name).spans(Q_LEN, K_LEN, batch=2, heads=HEADS).dense() for name in MASKS}
    seen = {tuple(p.expand(2, HEADS, -1, -1).flatten().tolist()) for p in pictures.values()}
    assert len(seen) == len(MASKS)
    # Checkpointing differs in what it keeps from the forward pass.
    kept = {}
    for ac in FORWARD_CALLS:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.shape) or x, lambda x: x
        ):
            model = Model(True, ac)
            model(torch.randn(2, Q_LEN, WIDTH, requires_grad=True), _mask("causal"))
        kept[ac] = len(sizes)
    assert kept["full"] < kept["none"]
    _, calls = _run("attention", "selective", _mask("causal"))
    _, all_calls = _run("attention", "full", _mask("causal"))
    assert calls != all_calls
