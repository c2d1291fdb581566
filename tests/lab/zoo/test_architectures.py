"""Each architecture of the zoo builds, trains in the eager implementation, and keeps its weights."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from torch.utils._pytree import tree_leaves

from attnspan.testing import assert_isolated
from attnspan_lab.zoo import _exceptions as tables
from attnspan_lab.zoo import diffusers, transformers
from attnspan_lab.zoo.architecture import IMPLEMENTATIONS, LAYOUTS
from attnspan_lab.zoo.torch_attention import eager

# Of the other libraries' own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
    pytest.mark.filterwarnings("ignore:attnspan.* reads its masks:UserWarning"),
]
ARCHITECTURES = transformers.architectures() + diffusers.architectures()
TOKENS = 48


def _gradients(model, batch):
    """The loss, or a stand-in for models that have none, and the gradients."""
    output = model(**batch)
    found = getattr(output, "loss", None)
    if found is None:
        results = [x for x in tree_leaves(output[0]) if x.is_floating_point()]
        found = torch.stack([x.square().mean() for x in results]).sum()
    model.zero_grad()
    found.backward()
    return found, [x.grad for x in model.parameters() if x.grad is not None]


def _some(every):
    """All in the long run, and every nth in the ordinary one."""
    return [
        pytest.param(x, id=x.name, marks=[pytest.mark.long] if i % every else [])
        for i, x in enumerate(ARCHITECTURES)
    ]


@pytest.mark.parametrize(("module", "least"), [(transformers, 65), (diffusers, 18)])
def test_there_are_many_and_the_others_have_a_reason(module, least):
    names, missing = [x.name for x in module.architectures()], module.left_out()
    assert len(set(names)) == len(names) >= least
    assert not set(names) & set(missing)
    assert all(missing.values())
    assert {f"attnspan_lab.zoo.{x.library}" for x in module.architectures()} == {module.__name__}
    for name in ("BENCHES", "CHANGES", "IMAGE_FORMS", "LEFT_OUT", "NOT_PACKED", "NOT_PADDED"):
        assert set(getattr(tables, name)) <= {x.name for x in ARCHITECTURES} | set(transformers.left_out())


@pytest.mark.parametrize("architecture", _some(50))
def test_gradients_are_finite_in_each_layout_and_attention_matters(architecture):
    model, layouts = architecture.make("eager", "tiny"), []
    assert model.training
    for layout in LAYOUTS:
        batch, again = (architecture.batch(layout, TOKENS, "tiny") for _ in range(2))
        if batch is None:
            continue
        layouts.append(layout)
        for x, y in zip(tree_leaves(batch), tree_leaves(again), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        loss, gradients = _gradients(model, batch)
        assert torch.allclose(loss, _gradients(model, batch)[0], rtol=1e-5)  # nothing is drawn at random
        assert gradients
        assert all(torch.isfinite(x).all() for x in (loss, *gradients))
        if layout == "plain":
            other = _gradients(architecture.make("identity", "tiny"), batch)[0]
            assert abs(loss - other) > 1e-4 * abs(loss)
        if layout == "packed":
            ids = (batch["position_ids"] == 0).cumsum(1) - 1
            assert_isolated(model, {k: x for k, x in batch.items() if k != "labels"}, ids)
    assert layouts


@pytest.mark.parametrize("architecture", _some(90))
def test_weights_are_the_same_for_each_implementation(architecture):
    wanted = architecture.make("eager", "tiny").state_dict()
    for implementation in IMPLEMENTATIONS:
        try:
            got = architecture.make(implementation, "tiny").state_dict()
        except (ValueError, TypeError):  # Some families do not know SDPA or Flex.
            assert implementation in ("sdpa", "flex")
            continue
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], x) for name, x in wanted.items())


@pytest.mark.long
@pytest.mark.parametrize(
    "architecture", [x for x in ARCHITECTURES if "bench" in x.sizes], ids=lambda x: x.name
)
def test_bench_sizes_run(architecture):
    model, batch = architecture.make("attnspan", "bench"), architecture.batch("plain", 256, "bench")
    loss, gradients = _gradients(model, batch)
    assert all(torch.isfinite(x).all() for x in (loss, *gradients))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_the_written_out_attention_is_torchs(options):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 8, generator=g) for h in (4, 2, 2))
    if "enable_gqa" not in options:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    masks = [None, torch.ones(6, 6, dtype=torch.bool).tril(1), torch.randn(2, 4, 6, 6, generator=g)]
    for mask in masks[: 1 if options.get("is_causal") else 3]:
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        assert torch.allclose(eager(q, k, v, attn_mask=mask, **options), wanted, atol=1e-6)
