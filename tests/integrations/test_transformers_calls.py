"""What `attend` and `make_mask` take and refuse, masks of users, and dropout."""

import gc
import warnings
import weakref

import pytest
import torch
from closeness import relative_error
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

transformers = pytest.importorskip("transformers")

from transformers_models import FORWARD, LEFT_PADDED, TOKENS, assert_equals_eager, build  # noqa: E402
from watching import Watching  # noqa: E402

import attnspan.integrations.transformers as adapter  # noqa: E402
from attnspan import causal  # noqa: E402
from attnspan.errors import OptionError, ShapeError  # noqa: E402
from attnspan.integrations import _all_pairs  # noqa: E402
from attnspan.masks.bounds import Spans  # noqa: E402
from attnspan.torch import attention  # noqa: E402

LAYER = torch.nn.Module()
LOWEST = torch.finfo(torch.float32).min


def _qkv(q_len=8, k_len=8):
    torch.manual_seed(0)
    return torch.randn(1, 2, q_len, 16), torch.randn(1, 2, k_len, 16), torch.randn(1, 2, k_len, 16)


VISIBLE = (torch.ones(12, 12).tril().bool() & (torch.arange(12) != 3)) | torch.eye(12).bool()
MASKS = {
    "all rows": VISIBLE[None, None],
    "each row": torch.stack([VISIBLE, torch.ones(12, 12).tril().bool()])[:, None],
    "each head": torch.stack([VISIBLE, *[torch.ones(12, 12).tril().bool()] * 3])[None].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("visible", MASKS.values(), ids=MASKS)
def test_boolean_masks_of_users(visible):
    model = build("llama")
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, attention_mask=torch.zeros(visible.shape).masked_fill(~visible, LOWEST)).logits
    model.set_attn_implementation("attnspan")
    assert relative_error(model(TOKENS, attention_mask=visible).logits, wanted) < 3e-6


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(make):
    q, k, v = _qkv(5, 9)
    wanted = scaled_dot_product_attention(q, k, v, attn_mask=make(5, 9))
    assert relative_error(adapter.attend(LAYER, q, k, v, make(5, 9))[0].transpose(1, 2), wanted) < 2e-6


def test_floating_masks_of_users():
    """With the lowest number for what is hidden, and biases."""
    lowest = torch.zeros(2, 1, 12, 12).masked_fill(~VISIBLE, LOWEST)
    lowest[0, :, :, :4] = LOWEST
    inputs, seeing = {"input_ids": TOKENS}, LEFT_PADDED.bool()
    for mask in (lowest, lowest + torch.randn(2, 1, 12, 12)):
        assert_equals_eager(build("llama"), {**inputs, "attention_mask": mask}, 2, valid=seeing)


def test_a_row_of_lowest_numbers_sees_nothing():
    mask = torch.zeros(1, 1, 8, 8)
    mask[:, :, 2] = LOWEST
    out = adapter.attend(LAYER, *_qkv(), mask)[0]
    assert (out == 0).all((0, 2, 3)).tolist() == [row == 2 for row in range(8)]


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("q_len", "k_len"), [(8, 8), (1, 8), (3, 8)])
def test_without_a_mask_the_last_query_is_at_the_last_key(q_len, k_len, is_causal, sliding_window):
    """As in flash-attn, which transformers calls so after a cache."""
    q, k, v = _qkv(q_len, k_len)
    back = torch.arange(k_len - q_len, k_len)[:, None] - torch.arange(k_len)
    visible = back >= 0 if is_causal else torch.ones_like(back).bool()
    if sliding_window is not None:
        visible &= back.abs() < sliding_window
    wanted = scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)
    got = adapter.attend(LAYER, q, k, v, is_causal=is_causal, sliding_window=sliding_window)[0]
    assert relative_error(got, wanted) < 1e-6


def test_more_queries_than_keys_are_not_causal():
    q, k, v = _qkv(8, 5)
    with pytest.raises(ShapeError, match=r"as many keys as queries, 8, got 5\. Pass is_causal=False"):
        adapter.attend(LAYER, q, k, v)
    wanted = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert relative_error(adapter.attend(LAYER, q, k, v, is_causal=False)[0], wanted) < 1e-6


def test_a_name_without_a_mask_function_is_refused():
    """transformers makes no masks for it: padding and windows would be lost."""
    model = build("llama")
    transformers.AttentionInterface.register("attend_alone", adapter.attend)
    model.set_attn_implementation("attend_alone")
    text = r"got None, and attn_implementation='attend_alone'\. Load the model with 'attnspan'"
    with pytest.raises(OptionError, match=text):
        model(TOKENS, attention_mask=LEFT_PADDED)
    model.set_attn_implementation("attnspan")
    wanted = model(TOKENS, attention_mask=LEFT_PADDED).logits
    transformers.AttentionMaskInterface.register("attend_alone", adapter.make_mask)
    model.set_attn_implementation("attend_alone")
    assert torch.equal(model(TOKENS, attention_mask=LEFT_PADDED).logits, wanted)


REFUSED = [
    *(({name: torch.zeros(1)}, OptionError, f"{name}: expected None, got a Tensor")
      for name in ("topk_indices", "block_indices", "block_table", "read_index", "cache")),
    ({"indices": torch.zeros(1, 8, 2)}, OptionError, "attention_mask with indices: expected a floating mask"),
    ({"attention_mask": torch.ones(1, 8)}, TypeError, "boolean or floating tensor with four dims"),
    *(({"attention_mask": torch.ones(1, 1, 8, 8, dtype=dtype)}, TypeError, str(dtype))
      for dtype in (torch.int32, torch.int64)),
]  # fmt: skip


def test_what_is_refused():
    for given, error, text in REFUSED:
        with pytest.raises(error, match=text):
            adapter.attend(LAYER, *_qkv(), **{"attention_mask": None, **given})
    model = build("llama")
    model.set_attn_implementation("attnspan")
    with pytest.raises(OptionError, match='attn_implementation="eager"'):
        model(TOKENS, output_attentions=True)


@pytest.mark.parametrize("name", ["roformer", "xglm"])
def test_a_model_that_would_misread_our_masks_is_refused(name):
    """Its attention is its own, but its masks are those of transformers."""
    config = transformers.AutoConfig.for_model(name, vocab_size=64, num_hidden_layers=1)
    with pytest.raises(OptionError, match=r"expected a model that calls .*, got (RoFormer|XGLM)Model"):
        transformers.AutoModel.from_config(config, attn_implementation="attnspan")


def test_a_model_that_computes_attention_itself_is_named():
    config = transformers.AutoConfig.for_model("deberta", vocab_size=64, num_hidden_layers=1)
    with pytest.warns(adapter.OwnAttentionWarning, match="DebertaModel computes attention in its own code"):
        transformers.AutoModel.from_config(config, attn_implementation="attnspan")


@pytest.mark.parametrize("name", ["doge", "bigbird_pegasus", "t5gemma2_decoder"])
def test_models_that_read_their_masks_are_named(name):
    _all_pairs._said.discard(f"{name} reads its masks, so they are made")
    config = transformers.AutoConfig.for_model(name)
    said = f"{name} reads its masks, so they are made for all pairs"
    with pytest.warns(adapter.AllPairsWarning, match=said):
        mask = adapter.make_mask(2, 3, 4, config=config)
    assert mask.shape == (2, 1, 3, 4)
    assert torch.equal(mask == 0, torch.ones(3, 4).tril().bool().expand(2, 1, -1, -1))


def test_a_function_that_nobody_knows_is_evaluated_and_said_once():
    known = transformers.masking_utils.causal_mask_function
    unknown = lambda b, h, q, k: (k <= q) & (k % 3 != 1)  # noqa: ARG005, E731
    with pytest.warns(adapter.AllPairsWarning, match=r"<lambda> is not one of transformers' own"):
        got = adapter.make_mask(2, 6, 6, mask_function=transformers.masking_utils.or_masks(known, unknown))
    assert torch.equal(got, adapter.make_mask(2, 6, 6))


@pytest.mark.filterwarnings("ignore::attnspan.integrations.transformers.AllPairsWarning")
def test_an_unknown_function_has_the_positions_of_packed_documents():
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    near = lambda b, h, q, k: (k < 2) | (q - k < 2)  # noqa: ARG005, E731
    given, shown = {"position_ids": positions, "and_mask_function": near}, []
    for name in ("eager", "attnspan"):
        config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=1, attn_implementation=name)
        made = transformers.masking_utils.create_causal_mask
        shown.append(made(config, torch.zeros(1, 12, 8), None, None, **given))
    bounds = shown[1].to(torch.int32).unflatten(3, (-1, 2))[:, :, :, :-1].contiguous()
    assert torch.equal(Spans(bounds, 12).dense(), shown[0] == 0)


def test_functions_of_masks_take_keywords_as_before():
    masking = transformers.masking_utils
    valid = torch.tensor([[True, False]])
    assert adapter.make_mask(1, 2, 2, mask_function=masking.padding_mask_function(padding_mask=valid)).equal(
        adapter.make_mask(1, 2, 2, mask_function=masking.padding_mask_function(valid))
    )
    assert masking.sliding_window_overlay(sliding_window=2)(0, 0, 5, 4)
    with pytest.raises(TypeError, match="unexpected keyword"):
        masking.sliding_window_overlay(2, window=3)


def _seed(operator, arguments, _):
    """The seed of a forward call."""
    return int(arguments["dropout_seed"]) if str(operator) == FORWARD else None


def _step(model, call, seed):
    """Results and gradients of a training step."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = call(input_ids=TOKENS, use_cache=False).logits
    out.pow(2).mean().backward()
    return out.detach(), torch.cat([x.grad.flatten() for x in model.parameters()])


def _dropping():
    model = build("llama", attention_dropout=0.3).train()
    model.set_attn_implementation("attnspan")
    return model


def test_each_layer_and_step_draws_a_seed_of_its_own():
    model = _dropping()
    with Watching(_seed) as first:
        out, gradients = _step(model, model, 0)
    with Watching(_seed) as again:
        equal = _step(model, model, 0)
        model(input_ids=TOKENS, use_cache=False)
    assert torch.equal(out, equal[0])
    assert torch.equal(gradients, equal[1])
    assert first.seen == again.seen[:2]
    assert len(set(again.seen)) == 4
    assert relative_error(_step(model, model, 1)[0], out) > 0.1


@pytest.mark.parametrize(("q_len", "k_len"), [(64, 64), (64, 96), (96, 64)])
def test_dropped_weights_are_0_and_others_grow(q_len, k_len):
    """With the unit matrix for values, the output is the weights; attention across has other lengths."""
    q, k, _ = _qkv(q_len, k_len)
    everything, valid = transformers.masking_utils.bidirectional_mask_function, torch.arange(k_len) < 60
    mask = adapter.make_mask(1, q_len, k_len, mask_function=everything, attention_mask=valid[None])
    unit = torch.eye(k_len).expand(1, 2, k_len, k_len)
    weights, dropped = (adapter.attend(LAYER, q, k, unit, mask, dropout=p)[0] for p in (0.0, 0.25))
    kept = dropped != 0
    assert relative_error(dropped[kept], weights[kept] / 0.75) < 1e-6
    assert abs(kept[..., :60].float().mean() - 0.75) < 0.02
    assert not kept[..., 60:].any()


def _recompute(model, **options):
    name = "activation_checkpointing_enable"  # as newer versions of transformers call it
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(options)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_draw_the_same_seeds(reentrant):
    model = _dropping()
    wanted = _step(model, model, 0)
    _recompute(model, use_reentrant=reentrant)
    with Watching(_seed) as seen:
        got = _step(model, model, 0)
    assert len(seen.seen) == 4
    assert len(set(seen.seen)) == 2
    assert torch.equal(got[0], wanted[0])
    assert relative_error(got[1], wanted[1]) < 1e-6


def test_dropout_of_an_encoder_and_a_decoder():
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    model = build("bart", "AutoModelForSeq2SeqLM", **sizes)
    inputs = {"input_ids": TOKENS, "attention_mask": LEFT_PADDED, "decoder_input_ids": TOKENS[:, :7]}
    assert_equals_eager(model.train(), inputs, 6)
    for part in model.modules():
        if hasattr(part, "is_causal"):
            part.dropout = 0.3
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model(**inputs).logits)
    assert torch.equal(found[0], found[1])
    assert relative_error(found[2], found[0]) > 0.01


COMPILED = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])


@COMPILED
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_layers_draw_seeds_too(backend):
    """Inductor draws other numbers than eager code; a seed of torch's generator still decides them."""
    model = _dropping()
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend=backend)
    first, again, other = (_step(model, call, seed) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert relative_error(other[0], first[0]) > 0.1


@COMPILED
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_recomputation_draws_the_same_seeds(backend):
    model, found = _dropping(), []
    for checkpointing in (False, True):
        if checkpointing:
            _recompute(model, use_reentrant=False)
        torch._dynamo.reset()
        found.append(_step(model, torch.compile(model, backend=backend), 0))
    assert relative_error(found[1][0], found[0][0]) < 1e-6
    assert relative_error(found[1][1], found[0][1]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["jit", "make_fx"])
def test_a_recorded_model_meets_other_padding(recorder):
    """A mask that is lowered from the values of its array would be a constant of the program."""
    model = build("llama").requires_grad_(False)  # jit takes weights for constants
    left, right = LEFT_PADDED, LEFT_PADDED.flip(1)

    def run(mask):
        return model(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits

    model.set_attn_implementation("eager")
    wanted = run(right)[right.bool()]
    model.set_attn_implementation("attnspan")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # transformers' own, of sizes
        by_jit = recorder == "jit"
        recorded = torch.jit.trace(run, (left,), check_trace=False) if by_jit else make_fx(run)(left)
    assert relative_error(recorded(right)[right.bool()], wanted) < 3e-6


def test_layers_that_share_offsets_lower_them_once(monkeypatch):
    """Also below a causal mask, which each layer combines with the documents anew."""
    made, documents, (q, k, v) = [], adapter.documents, _qkv()
    monkeypatch.setattr(adapter, "documents", lambda *given: made.append(given) or documents(*given))

    def attend(offsets):
        return adapter.attend(LAYER, q, k, v, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)[0]

    offsets = torch.tensor([0, 3, 8])
    assert torch.equal(attend(offsets), attend(offsets))
    assert len(made) == 1
    offsets[1] = 5  # A batch that is written into the same tensor.
    wanted = attention(q, k, v, mask=causal() & documents(torch.tensor([0, 5, 8])))
    assert torch.equal(attend(offsets), wanted.transpose(1, 2))
    gone = weakref.ref(offsets)
    del offsets, made[:]
    gc.collect()
    assert gone() is None
