"""Failure 2: a mask function that captures data, under `torch.compile` and activation checkpointing.

    python examples/failures/mask_functions.py

FlexAttention takes a mask as a function of indices. Here it captures document ids that change at every step,
and the compiler must trace it. You see one attention layer in every combination of

- the mask: a closure, a `functools.partial`, or attnspan's, which is a tensor
- compiling: not at all, inside of the checkpointed region, or around it
- checkpointing: none, selective, full

Each cell runs three steps with new ids. It passes if results equal float64's and code compiles once.
"""

import re
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from report import first_line, show
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan import causal, segments
from attnspan.torch import attention, checkpoint_policy

BATCH, LENGTH, HEADS, DIM = 2, 64, 2, 16
COMPILING, CHECKPOINTING = ("none", "inside", "around"), ("none", "selective", "full")


def closure(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, _, q, k: (q >= k) & (ids[b, q] == ids[b, k])


def of_arguments(ids: Tensor) -> Callable[..., Tensor]:
    def visible(ids: Tensor, b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[b, q] == ids[b, k])

    return partial(visible, ids)


def flex(mask: Callable[[Tensor], Callable[..., Tensor]], *qkv: Tensor, ids: Tensor) -> Tensor:
    blocks = create_block_mask(mask(ids), BATCH, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(*qkv, block_mask=blocks)  # type: ignore[return-value]


def spans(*qkv: Tensor, ids: Tensor) -> Tensor:
    return attention(*qkv, mask=causal() & segments(ids))


WAYS: dict[str, Callable[..., Tensor]] = {
    "FlexAttention, closure": partial(flex, closure),
    "FlexAttention, functools.partial": partial(flex, of_arguments),
    "attnspan": spans,
}


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.project = attend, nn.Linear(HEADS * DIM, 3 * HEADS * DIM)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3 * HEADS, DIM)).transpose(1, 2).chunk(3, 1)
        return self.attend(q, k, v, ids=ids)


def run_cell(attend: Callable[..., Tensor], compiling: str, checkpointing: str, *, train: bool) -> str:
    """Run three steps. Return "ok", or the reason why they fail."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, counter = Layer(attend).requires_grad_(train), CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, fullgraph=True, backend=counter)
    step = compiled(layer) if compiling == "inside" else layer
    if checkpointing != "none":
        contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        options = {"context_fn": contexts} if checkpointing == "selective" else {}
        step = partial(checkpoint, step, use_reentrant=False, **options)
    step = compiled(step) if compiling == "around" else step
    exact = Layer(spans).double()
    exact.load_state_dict(layer.state_dict())
    for _ in range(3):
        x = torch.randn(BATCH, LENGTH, HEADS * DIM, requires_grad=train)
        ids = torch.randint(3, (BATCH, LENGTH)).sort().values
        wanted = exact(x.double(), ids)
        try:
            torch.testing.assert_close(out := step(x, ids), wanted.float())
            if train:
                (got,), (right,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, wanted))
                torch.testing.assert_close(got, right)
        except Exception as error:
            place = re.findall(r'flex_attention.py", line \d+, in (\w+)\n +(.*)', str(error))
            return first_line(error) + (f" (FlexAttention's {place[-1][0]}: {place[-1][1]})" if place else "")
    return "ok" if counter.frame_count == (compiling != "none") else f"{counter.frame_count} compilations"


def main() -> dict[tuple[str, ...], str]:
    warnings.simplefilter("ignore")  # FlexAttention warns that it runs without a compiler
    found = {}
    for train in (False, True):
        reasons: dict[str, int] = {}
        rows: list[list[str]] = []
        for (name, attend), compiling in product(WAYS.items(), COMPILING):
            rows.append([name, compiling])
            for ac in CHECKPOINTING:
                cell = found[name, compiling, ac, str(train)] = run_cell(attend, compiling, ac, train=train)
                number = reasons.setdefault(cell, len(reasons) + 1) if cell != "ok" else 0
                rows[-1].append(f"fails [{number}]" if number else "ok")
        title = "Training: forward and backward" if train else "Inference: forward alone"
        notes = (f"[{number}] {reason}" for reason, number in reasons.items())
        show(title, ("attention", "compiled", *CHECKPOINTING), rows, [*notes])
    return found


if __name__ == "__main__":
    main()
