"""Failure 1: the attention of a compiled extension, inside `torch.compile`.

    python examples/failures/graph_breaks.py

This program compiles a small C library and calls it from a layer of a diffusion transformer. The layer runs
under `torch.compile`, with another softmax scale at each step. You see five ways to call attention there:

1. The library, called directly: the compiler breaks the graph at the call.
2. A custom operator whose fake kernel promises other strides than the kernel returns: an error.
3. A custom operator with a right fake kernel: each new scale recompiles, until the limit.
4. `attnspan.torch.wrap(extension)`: no break, and one recompile.
5. `attnspan.torch.attention`: no break, one recompile, and a faster kernel.
"""

from collections.abc import Callable

import torch
from extension import extension
from report import first_line, milliseconds, peak_megabytes, show
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from attnspan.torch import attention, wrap

BATCH, LENGTH, HEADS, DIM, STEPS = 1, 512, 8, 64, 12
WIDTH = HEADS * DIM


# The compiler reads the strides of the result from here. The kernel returns contiguous memory.
wrong = torch.library.custom_op("failures::wrong", extension, mutates_args=())
wrong.register_fake(lambda q, *_: torch.empty_strided(q.shape, q.stride()))
right = torch.library.custom_op("failures::right", extension, mutates_args=())
right.register_fake(lambda q, *_: torch.empty(q.shape))
wrapped = wrap(extension, name="extension", layout="bshd", varying=("softmax_scale",))


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)  # slices of one tensor
        return x + self.out(self.attend(q, k, v, softmax_scale=scale).flatten(2))


def spans(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    # A float that varies scales q: the compiler takes a float argument of any operator for a constant.
    return attention(q * softmax_scale, k, v, scale=1.0, layout="bshd")


WAYS: dict[str, Callable[..., Tensor]] = {
    "extension, called directly": extension,
    "custom_op, wrong fake kernel": wrong,
    "custom_op, right fake kernel": right,
    "attnspan.torch.wrap(extension)": wrapped,
    "attnspan.torch.attention": spans,
}


def measure(attend: Callable[..., Tensor]) -> dict[str, str]:
    """Compile a layer, run it with STEPS scales, and count the compiler's work."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer, x = Layer(attend), torch.randn(BATCH, LENGTH, WIDTH)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter)
    try:
        for step in range(STEPS):
            torch.testing.assert_close(compiled(x, 0.1 + step / 100), layer(x, 0.1 + step / 100))
    except AssertionError as error:
        return {"outcome": "an error", "error": first_line(error)}
    breaks = sum(counters["graph_break"].values())
    recompiles = counter.frame_count - 1 - breaks
    limit = counter.frame_count > torch._dynamo.config.recompile_limit
    return {
        "graph breaks": str(breaks),
        "recompiles": f"{recompiles}, the limit" if limit else str(recompiles),
        "ms": milliseconds(lambda: compiled(x, 0.1)),
        "MB": peak_megabytes(lambda: compiled(x, 0.1)),
        "outcome": "back to eager code" if limit else "runs",
    }


COLUMNS = ("graph breaks", "recompiles", "ms", "MB", "outcome")


@torch.no_grad()
def main() -> dict[str, dict[str, str]]:
    found = {name: measure(attend) for name, attend in WAYS.items()}
    rows = [(name, *(row.get(column, "-") for column in COLUMNS)) for name, row in found.items()]
    notes = [f"{name}: {row['error']}" for name, row in found.items() if "error" in row]
    show(f"A compiled layer over {STEPS} softmax scales", ("attention", *COLUMNS), rows, notes)
    return found


if __name__ == "__main__":
    main()
