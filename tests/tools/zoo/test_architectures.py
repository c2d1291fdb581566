"""Each architecture of the zoo builds, trains in the eager implementation, and keeps its weights."""

import pytest
import torch

pytest.importorskip("transformers")

from attnspan.tools.zoo import transformers as zoo
from attnspan.tools.zoo.architecture import LAYOUTS

ARCHITECTURES = zoo.architectures()
TOKENS = 48


def _gradients(model, batch):
    model.zero_grad()
    output = model(**batch)
    loss = getattr(output, "loss", None)
    loss = output[0].square().mean() if loss is None else loss
    loss.backward()
    return loss, [x.grad for x in model.parameters() if x.grad is not None]


def _some(values, every):
    """All in the long run, and every nth in the ordinary one."""
    return [
        pytest.param(x, id=x.name, marks=[pytest.mark.long] if i % every else [])
        for i, x in enumerate(values)
    ]


def test_there_are_many():
    assert len(ARCHITECTURES) >= 65
    assert len({a.name for a in ARCHITECTURES}) == len(ARCHITECTURES)


@pytest.mark.parametrize("architecture", _some(ARCHITECTURES, 12))
def test_gradients_are_finite_in_each_layout(architecture):
    model = architecture.make("eager", "tiny")
    found = 0
    for layout in LAYOUTS:
        batch = architecture.batch(layout, TOKENS, "tiny")
        if batch is not None:
            loss, gradients = _gradients(model, batch)
            assert torch.isfinite(loss)
            assert gradients
            assert all(torch.isfinite(x).all() for x in gradients)
            found += 1
    assert found
