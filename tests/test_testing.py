"""The probe for documents that see each other: it finds leaks, names them, and is silent without one."""

import pytest
import torch
from torch import nn

from attnspan import causal, documents
from attnspan.errors import OptionError, ShapeError
from attnspan.testing import assert_isolated, probe
from attnspan.torch import attention

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1]])


class Model(nn.Module):
    """One layer of attention under a mask, on embedded tokens."""

    def __init__(self, mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.mask = nn.Embedding(16, 8), nn.Linear(8, 8), mask

    def forward(self, input_ids):
        x = self.mix(self.embed(input_ids))[:, None]
        return {"logits": attention(x, x, x, mask=self.mask)[:, 0]}


def test_silent_where_documents_are_isolated():
    model = Model(causal() & documents([0, 3, 5, 7])).train()
    found = probe(model, {"input_ids": torch.arange(8)[None]}, IDS)
    assert found.isolated
    assert found.documents == 3
    assert model.training


def test_documents_of_other_rows_are_others() -> None:
    class Rows(torch.nn.Module):
        def forward(self, x):
            return x + x.roll(1, 0)

    found = probe(Rows(), {"x": torch.randn(2, 4, 3)}, torch.zeros(2, 4, dtype=torch.int64))
    assert [leak.rows[0][0] for leak in found.leaks] == [1, 0]


def test_names_module_and_rows_of_a_leak():
    model = Model(causal())
    with pytest.raises(
        AssertionError, match=r"document 0 is seen by 4 tokens .* first in Model: .* \(0, 3\)"
    ):
        assert_isolated(model, {"input_ids": torch.arange(8)[None]}, IDS)
    found = probe(model, {"input_ids": torch.arange(8)[None]}, IDS)
    assert [(leak.document, leak.rows) for leak in found.leaks] == [
        (0, ((0, 3), (0, 4), (0, 5), (0, 6))),
        (1, ((0, 5), (0, 6))),
    ]


def test_the_first_module_is_the_one_that_mixes():
    class Leaky(nn.Module):
        def forward(self, x):
            return x.roll(1, 1)

    model = nn.Sequential(nn.Linear(4, 4), Leaky(), nn.Linear(4, 4))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    found = probe(model, {"x": torch.randn(2, 4, 4)}, torch.tensor([0, 0, 1, 1]))
    assert {leak.module for leak in found.leaks} == {"1"}


@pytest.mark.slow
def test_compiled_form_is_probed_by_its_results():
    model = Model(causal())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = probe(model, {"input_ids": torch.arange(8)[None]}, IDS, call=compiled)
    assert {leak.module for leak in found.leaks} == {"the result"}


def test_the_lowest_token_and_masked_logits_do_not_hide_a_leak():
    class Masked(Model):
        def forward(self, input_ids):
            logits = super().forward(input_ids)["logits"]
            return torch.cat([logits, torch.full_like(logits[..., :1], -torch.inf)], -1)

    zeros = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    assert not probe(Masked(causal()), zeros, IDS).isolated
    assert probe(Masked(causal() & documents([0, 3, 5, 7])), zeros, IDS).isolated


def test_refuses_batches_without_tokens_and_other_shapes():
    with pytest.raises(OptionError, match="input_ids"):
        probe(Model(causal()), {"labels": torch.arange(8)[None]}, IDS)
    with pytest.raises(ShapeError, match=r"documents: expected shape \(1, 4\), got"):
        probe(Model(causal()), {"input_ids": torch.arange(4)[None]}, IDS)
