"""attnspan in models of transformers: the eager implementation's results, by our operator, in one graph."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)

from collections import Counter

import pytest
import torch
from closeness import relative_error
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

import attnspan.integrations.transformers as adapter  # noqa: E402
from attnspan.errors import OptionError  # noqa: E402
from attnspan.testing import assert_isolated  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODERS = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},  # softcap, windows in every other layer
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "llama4_text": {"attention_chunk_size": 5, "num_local_experts": 2, "intermediate_size_mlp": 64},  # chunks
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128},
}
TOKENS = torch.arange(24).reshape(2, 12) % 60 + 3
PADDED = torch.ones(2, 12, dtype=torch.long).index_put((torch.tensor(0), torch.arange(4)), torch.tensor(0))
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 2]] * 2)
INPUTS = {
    "plain": {},
    "left padding": {"attention_mask": PADDED},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


def _model(name, kind="CausalLM"):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **DECODERS[name]})
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()


class Operators(TorchDispatchMode):
    """Counts calls by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


def _valid(given):
    return given.get("attention_mask", torch.ones(2, 12)).bool()


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_compute_what_eager_attention_does(name, given):
    model, valid = _model(name), _valid(given)
    results = {}
    for implementation in ("eager", "attnspan"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        with Operators() as operators:
            logits = model(TOKENS, **given).logits
            logits[valid].pow(2).mean().backward()
        gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        results[implementation] = logits.detach()[valid], gradients
    layers = model.config.num_hidden_layers
    assert operators.counts["attnspan.forward.default"] == layers
    assert operators.counts["attnspan.backward.default"] == layers
    for got, wanted in zip(results["attnspan"], results["eager"], strict=True):
        assert relative_error(got, wanted) < 3e-6


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", ["gemma3_text", "llama4_text"])
def test_models_are_one_graph_without_a_mask_of_all_pairs(name, given):
    model, valid = _model(name), _valid(given)
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, **given).logits
    model.set_attn_implementation("attnspan")
    torch._dynamo.reset()
    largest = []

    def look(graph, _):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        largest.extend(x.numel() for x in values if isinstance(x, torch.Tensor) and x.shape[-2:] == (12, 12))
        return graph.forward

    got = torch.compile(model, fullgraph=True, backend=look)(TOKENS, **given).logits
    assert relative_error(got[valid], wanted[valid]) < 3e-6
    assert largest == []


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}],
    ids=["dynamic", "static", "beams"],
)
def test_generation_is_equal_token_by_token(name, options):
    model, found = _model(name), []
    for implementation in ("eager", "attnspan"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        found.append(model.generate(TOKENS, attention_mask=PADDED, **options).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
def test_packed_documents_do_not_see_each_other(name):
    model = _model(name)
    model.set_attn_implementation("attnspan")
    ids = (POSITIONS == 0).cumsum(1)
    assert_isolated(model, {"input_ids": TOKENS, **INPUTS["packed"]}, ids)


def test_offsets_of_documents_without_positions():
    model = _model("llama")
    model.set_attn_implementation("attnspan")
    cu = torch.tensor([0, 7, 9, 12], dtype=torch.int32)
    wanted = model(TOKENS, **INPUTS["packed"]).logits
    # Positions that go on leave the offsets alone to tell.
    rope = model.model.rotary_emb
    forward = rope.forward
    rope.forward = lambda x, position_ids: forward(x, POSITIONS)
    got = model(TOKENS, cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False).logits
    assert relative_error(got, wanted) < 3e-6


def test_masks_of_ones_own():
    model = _model("llama")
    visible = torch.ones(12, 12).tril().bool() & (torch.arange(12) != 3)
    visible |= torch.eye(12).bool()
    floating = torch.zeros(12, 12).masked_fill(~visible, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, attention_mask=floating[None, None]).logits
    model.set_attn_implementation("attnspan")
    for mask in (visible, floating):
        got = model(TOKENS, attention_mask=mask.expand(2, 1, 12, 12)).logits
        assert relative_error(got, wanted) < 3e-6


def test_a_function_that_nobody_knows_is_evaluated_and_said_once():
    known = transformers.masking_utils.causal_mask_function
    unknown = lambda b, h, q, k: (k <= q) & (k % 3 != 1)  # noqa: E731
    with pytest.warns(adapter.UnknownMaskWarning, match=r"<lambda> is not one of transformers' own"):
        got = adapter.make_mask(2, 6, 6, mask_function=transformers.masking_utils.or_masks(known, unknown))
    assert torch.equal(got, adapter.make_mask(2, 6, 6))


def test_dropout_draws_from_torchs_generator():
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(adapter.attend(layer, q, k, v, dropout=0.5)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_what_is_refused():
    layer = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(OptionError, match='attn_implementation="eager"'):
        adapter.attend(layer, q, k, v, output_attentions=True)
    with pytest.raises(OptionError, match="block_table"):
        adapter.attend(layer, q, k, v, block_table=torch.zeros(1))
    with pytest.raises(TypeError, match="boolean or floating tensor of four dims"):
        adapter.attend(layer, q, k, v, torch.ones(1, 8))
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(TypeError, match=str(dtype)):
            adapter.attend(layer, q, k, v, torch.ones(1, 1, 8, 8, dtype=dtype))


def test_a_tower_of_ragged_images_calls_the_operator_once_a_layer():
    config = transformers.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 32},
    ).vision_config
    torch.manual_seed(0)
    model = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel._from_config(
        config, attn_implementation="attnspan"
    ).eval()
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [2, 2, 2]])
    patches = torch.randn(int(grid.prod(1).sum()), config.in_channels * config.temporal_patch_size * 14 * 14)
    with torch.no_grad(), Operators() as operators:
        got = model(patches, grid_thw=grid)
    assert operators.counts["attnspan.forward.default"] == 2
    model.set_attn_implementation("eager")
    wanted = model(patches, grid_thw=grid)
    assert relative_error(got.last_hidden_state, wanted.last_hidden_state) < 3e-6
