"""Masks that are made in inference mode serve training."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import attnspan as a
from attnspan.torch import attention

LENGTH = 6
_SLOPES = torch.tensor([0.5, 0.25])
_IDS = torch.tensor([[0, 0, 1, 1, 1, 1]])

CPU = {"backend": "cpu"}
COMPILED = ("prepared", "spans", "of inference ids", "dropout_seed", "dropout_seeds")


def _used(mask: a.Mask) -> a.Mask:
    """A mask that a call has lowered before."""
    q = torch.ones(1, 2, LENGTH, 8)
    attention(q, q, q, mask=mask)
    return mask


#: Makes the keywords of a call.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "prepared": lambda: {"mask": (a.causal() & a.segments(_IDS)).prepare(LENGTH, LENGTH)},
    "spans": lambda: {"mask": (a.causal() & a.segments(_IDS)).spans(LENGTH, LENGTH)},
    "ids": lambda: {"mask": a.segments(_IDS.clone())},
    "of inference ids": lambda: {"mask": a.segments(_IDS.clone()).prepare(LENGTH, LENGTH)},
    "lowered by a call": lambda: {"mask": _used(a.window(11))},
    "rows": lambda: {"mask": a.segments(_IDS).spans(LENGTH, LENGTH).take_queries(torch.arange(LENGTH))},
    "options": lambda: {"mask": a.causal().prepare(LENGTH, LENGTH, like=_IDS), "softcap": 3.0},
    "q_index": lambda: {
        "mask": a.causal().prepare(LENGTH, LENGTH, q_index=torch.arange(LENGTH)),
        "bias": a.alibi(_SLOPES),
    },
    "dropout_seed": lambda: {"mask": a.causal(), "dropout_p": 0.5, "dropout_seed": torch.tensor(3), **CPU},
    "dropout_seeds": lambda: {"dropout_p": 0.5, "dropout_seed": torch.tensor([[3, 4]]), **CPU},
    "alibi": lambda: {"bias": a.alibi(_SLOPES.clone()), **CPU},
    "relative": lambda: {"bias": a.relative(torch.arange(22.0).view(2, 11)), **CPU},
    "dense bias": lambda: {"bias": torch.eye(LENGTH), **CPU},
    "sinks": lambda: {"sinks": torch.ones(2), **CPU},
}


def _gradients(names: Iterable[str], backend: str | None, inference: bool) -> list[torch.Tensor]:
    with torch.inference_mode(inference):
        calls = [CALLS[name]() for name in names]
    q = torch.randn(1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(q: torch.Tensor, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
        return [attention(q, q, q, **call) for call in calls]

    outs = (torch.compile(run, fullgraph=True, backend=backend) if backend else run)(q, calls)
    return [torch.autograd.grad(out.square().sum(), q, retain_graph=True)[0] for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "backend"), [(CALLS, None), (COMPILED, "aot_eager")])
def test_gradients_are_those_of_an_ordinary_mask(names: Iterable[str], backend: str | None) -> None:
    found, wanted = _gradients(names, backend, inference=True), _gradients(names, None, inference=False)
    for name, got, want in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
