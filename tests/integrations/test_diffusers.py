"""attnspan in models of diffusers: the native backend's results, by our operator, in as many graphs."""

import copy
import gc
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
from closeness import relative_error
from covering import everything, few
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from watching import Watching

diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_processor import JointAttnProcessor2_0  # noqa: E402
from diffusers_models import MODELS, build, inputs_of  # noqa: E402

import attnspan.integrations.diffusers as adapter  # noqa: E402
from attnspan import causal, keys  # noqa: E402
from attnspan.errors import OptionError, ShapeError, UsageError  # noqa: E402
from attnspan.integrations import _diffusers_attention  # noqa: E402

pytestmark = [
    # The library's own.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]
# Models whose forward pass branches on data: no program without breaks, with any attention.
DYNAMIC = ("HunyuanVideo15", "Lumina2")


@pytest.fixture(autouse=True)
def _the_backend_is_process_wide():
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    before = registry._active_backend
    yield
    registry.set_active_backend(before)


def _attends(operator, *_):
    """The name of an operator of attention."""
    name = str(operator)
    if name.startswith("attnspan."):
        return name.split(".")[1]
    return "torch" if "scaled_dot_product" in name else None


def _run(model, inputs):
    model.zero_grad()
    with Watching(_attends) as operators:
        out = model(**inputs, return_dict=False)[0]
        out.pow(2).mean().backward()
    gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    return out.detach(), gradients, operators.counts


#: One of each kind of processor. `make zoo` runs all classes in the same way.
KINDS = ("SD3", "Flux", "QwenImage", "Wan", "PixArt", "HunyuanVideo", "CogVideoX")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in KINDS else pytest.mark.long) for x in MODELS]
)
def test_models_compute_what_the_native_backend_does(name):
    model, inputs = build(name), inputs_of(name)
    *wanted, native = _run(model, inputs)
    found = adapter.enable(model)
    *got, ours = _run(model, inputs)
    # Of each two, one is the backward pass.
    assert ours == {"attention": native["torch"] // 2, "attention_backward": native["torch"] // 2}
    assert len(found.layers) in (ours["attention"], ours["attention"] - model.config.get("num_layers", 0))
    for x, y in zip(got, wanted, strict=True):
        assert relative_error(x, y) < 1e-6
    adapter.disable(model)
    assert torch.equal(model(**inputs, return_dict=False)[0], wanted[0])


# test_diffusers_parallel.py compiles one with a mask. The others are compiled with diffusers' own too.
QUICK = ("CogView4",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.long) for x in MODELS if x not in DYNAMIC],
)
def test_models_are_one_graph_for_all_sizes(name):
    batches = [inputs_of(name, tokens) for tokens in (64, 100, 144)]
    model, graphs = build(name), []
    if not everything():
        model.transformer_blocks = model.transformer_blocks[:1]  # Each takes seconds to compile.
    wanted = [model(**batch, return_dict=False)[0] for batch in batches]
    for enabled in (True,) if name in QUICK else (False, True):
        if enabled:
            adapter.enable(model)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        program = torch.compile(model, fullgraph=True, backend=counter)
        with torch.set_grad_enabled(everything()):  # test_diffusers_parallel.py compiles gradients.
            got = [program(**batch, return_dict=False)[0] for batch in batches]
        graphs.append(counter.frame_count)
    for x, y in zip(got, wanted, strict=True):
        assert relative_error(x, y) < 1e-6
    assert graphs[-1] <= graphs[0] <= 3


B, H, S, T, D = 2, 3, 6, 9, 8  # T keys
HOLES = torch.tensor([[1, 0] * 4 + [1], [1, 1, 1, 0, 1, 0, 1, 1, 0]]).bool()
PAIRS = torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(1)) > 0.4
MASKS = {
    "none": None,
    "keys": HOLES,
    "keys as numbers": HOLES.long(),
    "keys of a row": HOLES[:1, None, None],
    "keys, expanded": HOLES[:, None, None].expand(B, H, S, T),
    "keys of heads": PAIRS[:, :, :3].transpose(1, 2),
    "pairs": PAIRS,
    "pairs of heads": PAIRS[:1].transpose(0, 1) ^ torch.tensor([1, 0, 1]).bool()[:, None, None],
    "pairs of all": PAIRS[0, 0],
    "added to keys": torch.zeros(B, 1, 1, T).masked_fill(~HOLES[:, None, None], torch.finfo().min),
    "added to pairs": torch.linspace(-2, 2, S * T).reshape(S, T),
    "torch's causal biases, upper": causal_upper_left(S, T),
    "torch's causal biases, lower": causal_lower_right(S, T),
}


def _qkv():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(B, n, H, D, generator=generator, requires_grad=True) for n in (S, T, T))


COMPILED = ("keys as numbers", "pairs of heads", "added to keys")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [(x, "eager") for x in MASKS] + [(x, "compiled") for x in COMPILED]
)
def test_masks(name, mode):
    mask = MASKS[name]

    def ours(q, k, v, mask):
        return adapter.attend(q, k, v, mask, scale=0.3)

    def theirs(q, k, v, mask):
        mask = mask.bool()[:, None, None] if mask is not None and mask.shape == (B, T) else mask
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, mask, scale=0.3).transpose(1, 2)

    results = []
    torch._dynamo.reset()
    for attend in (ours, theirs):
        q, k, v = _qkv()
        if mode == "compiled" and attend is ours:
            attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out = attend(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for x, y in zip(*results, strict=True):
        assert relative_error(x, y) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("runs", few([1, 9, 4], 2))
def test_compiled_code_takes_any_number_of_runs_of_keys(runs):
    q, k = torch.randn(2, 1, 40, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    ends = torch.arange(40) // 2
    valid = ((ends % 2 == 0) & (ends < 2 * runs))[None]
    program = torch.compile(adapter.attend, fullgraph=True, backend="aot_eager", dynamic=False)
    assert relative_error(program(q, k, k, valid), adapter.attend(q, k, k, keys(valid))) < 1e-6


def test_layers_share_the_encoding_of_a_mask_while_it_lives_and_is_not_written_into(monkeypatch):
    made = []
    from_dense = _diffusers_attention.from_dense
    monkeypatch.setattr(_diffusers_attention, "from_dense", lambda x: made.append(x) or from_dense(x))
    q, k, v = _qkv()
    first, second = PAIRS.clone(), PAIRS.clone()
    before = [adapter.attend(q, k, v, mask) for mask in (first, first, second)]
    assert len(made) == 2
    first.logical_not_()
    after, wanted = adapter.attend(q, k, v, first), adapter.attend(q, k, v, ~PAIRS)
    assert torch.equal(after, wanted)
    assert not torch.equal(after, before[0])
    made.clear()
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None


def test_causal_and_lse_and_groups():
    q, k, v = _qkv()
    out, lse = adapter.attend(q, k[:, :, :1], v[:, :, :1], is_causal=True, enable_gqa=True, return_lse=True)
    q_bhsd, k_bhsd, v_bhsd = q.transpose(1, 2), k[:, :, :1].transpose(1, 2), v[:, :, :1].transpose(1, 2)
    wanted = scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True, enable_gqa=True)
    assert relative_error(out, wanted.transpose(1, 2)) < 1e-6
    scores = (q_bhsd @ k_bhsd.mT / D**0.5).masked_fill(~torch.ones(S, T).tril().bool(), -torch.inf)
    assert relative_error(lse, scores.logsumexp(-1).transpose(1, 2)) < 1e-6


def test_dropout_draws_from_torchs_generator():
    q, k, v = _qkv()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(adapter.attend(q, k, v, dropout_p=0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


OURS = {"attention", "attention_backward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3", "Flux"])
def test_one_model_and_its_copies_and_no_other(name):
    model, other = (build(name) for _ in range(2))
    inputs = inputs_of(name)
    for module, own in zip(model.modules(), other.modules(), strict=True):
        if hasattr(module, "processor"):
            module.processor = own.processor  # Users share them.
    adapter.enable(model)
    models = model, other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert [set(_run(x, inputs)[2]) for x in models] == [OURS, {"torch"}, OURS, OURS]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3", "Flux"])
def test_diffusers_own_switch(name):
    model, inputs = build(name), inputs_of(name)
    seen = []
    for backend in ("attnspan", "native", "attnspan"):
        model.set_attention_backend(backend)
        seen.append(set(_run(model, inputs)[2]))
    model.reset_attention_backend()
    diffusers.models.attention_dispatch._AttentionBackendRegistry.set_active_backend("native")
    seen.append(set(_run(model, inputs)[2]))
    with diffusers.attention_backend("attnspan") if name == "Flux" else torch.enable_grad():
        seen.append(set(_run(model, inputs)[2]))
    assert seen == [OURS, {"torch"}, OURS, {"torch"}, OURS if name == "Flux" else {"torch"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_model_that_checks_the_name_of_its_backend_takes_ours():
    """AnyFlow asks for a name of FlexAttention, whose masks are spans here."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
    model = diffusers.AnyFlowFARTransformer3DModel(**heads, **sizes).requires_grad_(False)
    inputs = {"hidden_states": torch.randn(1, 2, 4, 8, 8), "timestep": torch.tensor([[0.5, 0.5]])}
    inputs |= {"r_timestep": torch.tensor([[0.1, 0.1]]), "encoder_hidden_states": torch.randn(1, 3, 16)}
    inputs |= {"chunk_partition": [1, 1]}
    wanted = model(**inputs).sample
    model.set_attention_backend("attnspan")
    with Watching() as operators:
        got = model(**inputs).sample
    assert operators.counts["attnspan.attention.default"] == 2
    assert relative_error(got, wanted) < 1e-5
    adapter.disable(model)
    assert relative_error(model(**inputs).sample, wanted) < 1e-6


def test_a_pipeline_but_not_its_autoencoder():
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    sizes = {"in_channels": 4, "out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 1000}
    transformer = diffusers.DiTTransformer2DModel(**heads, **sizes)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    pipeline = diffusers.DiTPipeline(transformer.eval(), vae.eval(), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def images():
        generator = torch.Generator().manual_seed(0)
        with Watching(_attends) as operators:
            found = pipeline([1], num_inference_steps=2, generator=generator, output_type="np").images
        return torch.from_numpy(found), operators.counts

    wanted, native = images()
    assert str(adapter.enable(pipeline)) == "attnspan in 2 attention layers"
    got, ours = images()
    assert relative_error(got, wanted) < 1e-6
    assert ours == {"attention": 4, "torch": native["torch"] - 4}
    layers = tuple(f"vae.{part}.mid_block.attentions.0" for part in ("encoder", "decoder"))
    assert adapter.enable(pipeline, ["vae"]).layers == layers
    adapter.disable(pipeline, ["transformer", "vae"])
    assert images()[1] == native


class Inherited(JointAttnProcessor2_0):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Learned(torch.nn.Module):
    def forward(self, _attn, hidden_states, encoder_hidden_states, **_):
        q, k, v = (x.unflatten(2, (4, 16)).transpose(1, 2) for x in (hidden_states,) * 3)
        out = functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2), encoder_hidden_states


@pytest.mark.parametrize("kind", [Inherited, Learned])
def test_processors_of_ones_own(kind):
    model, inputs = build("SD3"), inputs_of("SD3")
    attn = model.transformer_blocks[0].attn
    del attn.processor  # A module cannot take the place of a plain attribute.
    attn.processor = processor = kind()
    *wanted, _ = _run(model, inputs)
    adapter.enable(model)
    *got, ours = _run(model, inputs)
    assert set(ours) == OURS
    assert (attn.processor is processor) == (kind is Learned)
    for x, y in zip(got, wanted, strict=True):
        assert relative_error(x, y) < 1e-6
    adapter.disable(model)
    assert type(attn.processor) is kind


def test_linear_attention_is_left_and_named():
    found = adapter.enable(build("Sana"))
    assert found.left == ("transformer_blocks.0.attn1", "transformer_blocks.1.attn1")
    assert str(found).endswith("unchanged: transformer_blocks.0.attn1, transformer_blocks.1.attn1")


SHAPES = r"shape \(B, Sk\) or one that broadcasts to \(2, 3, 6, 9\), got \(2, 5\)"
REFUSED = [
    (UsageError, r"Linear: expected calls of dispatch_attention_fn or F\.scaled_dot", torch.nn.Linear(2, 2)),
    (UsageError, "expected a module or a pipeline, got int", 3),
    (OptionError, r"parallel config.*integrations\.diffusers\.parallelize", {"_parallel_config": object()}),
    (ShapeError, SHAPES, {"attn_mask": torch.ones(2, 5).bool()}),
    (TypeError, r"or integers of shape \(B, Sk\), got torch.int64", {"attn_mask": PAIRS.long()}),
    (TypeError, "expected a mask, got str", {"attn_mask": "causal"}),
    (OptionError, "is_causal: expected is_causal or attn_mask", {"attn_mask": PAIRS, "is_causal": True}),
    (OptionError, "dropout_p", {"dropout_p": 1.0}),
]


def test_what_is_refused():
    q, k, v = _qkv()
    for error, text, given in REFUSED:
        with pytest.raises(error, match=text):
            adapter.attend(q, k, v, **given) if isinstance(given, dict) else adapter.enable(given)
    with pytest.raises(UsageError, match="components: expected None for a model"):
        adapter.enable(build("SD3"), ["transformer"])
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        adapter.attend(q, k[:, :, :1], v[:, :, :1])
    model = build("Flux")
    model.transformer_blocks[0].attn.processor._parallel_config = object()
    with pytest.raises(OptionError, match=r"integrations\.diffusers\.parallelize"):
        adapter.enable(model)


def test_masks_of_attnspan_are_taken():
    q, k, v = _qkv()
    got = adapter.attend(q, k, v, causal() & keys(HOLES))
    visible = (causal().spans(S, T).dense() & HOLES.numpy()[:, None, None]).astype(bool)
    assert relative_error(got, adapter.attend(q, k, v, torch.from_numpy(visible))) < 1e-6
    visible = lambda _b, _h, q, k: (k < q + 2) & (k != 3)  # noqa: E731
    block_mask = create_block_mask(visible, None, None, S, T, device="cpu")
    pairs = torch.ones(S, T).tril(1).bool() & (torch.arange(T) != 3)
    assert torch.equal(adapter.attend(q, k, v, block_mask), adapter.attend(q, k, v, pairs))


def test_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "diffusers.md"
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)
    assert names["out"].shape == (2, 8, 4, 16)
