"""Documents that positions tell, in models whose masks transformers makes without positions."""

import pytest
import torch
from closeness import relative_error
from covering import few

transformers = pytest.importorskip("transformers")

from transformers import BertModel, LlamaForCausalLM, LlamaModel  # noqa: E402
from transformers_models import FORWARD, POSITIONS, TOKENS, build  # noqa: E402
from watching import Watching  # noqa: E402

import attnspan.integrations.transformers  # noqa: E402, F401
from attnspan.testing import assert_isolated, probe  # noqa: E402

MARKERS = {"cls_token_id": 1, "sep_token_id": 2}
#: Encoders; a decoder that sees both ways; decoders that hand no positions over; one that makes its own mask.
MODELS = {
    "bert": ("AutoModel", {}),
    "modernbert": ("AutoModel", {"local_attention": 6, "global_attn_every_n_layers": 2, **MARKERS}),
    "eurobert": ("AutoModel", {}),
    "llama": ("AutoModel", {"is_causal": False}),
    "gpt_oss": ("AutoModel", {}),
    "opt": ("AutoModel", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "biogpt": ("AutoModel", {}),
}
IDS = (POSITIONS == 0).cumsum(1)


def _model(name):
    auto, sizes = MODELS[name]
    model = build(name, auto, **sizes)
    model.set_attn_implementation("attnspan")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_documents_are_what_they_are_alone(name):
    model = _model(name)
    with Watching() as operators:
        packed = model(TOKENS, position_ids=POSITIONS).last_hidden_state
    assert operators.counts[FORWARD] == model.config.num_hidden_layers
    for first, last in ((0, 7), (7, 9), (9, 12)):
        here = slice(first, last)
        alone = model(TOKENS[:, here], position_ids=POSITIONS[:, here]).last_hidden_state
        assert relative_error(packed[:, here], alone) < 3e-6
    assert_isolated(model, {"input_ids": TOKENS, "position_ids": POSITIONS}, IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["modernbert", "bert", "gpt_oss", "llama"], 2))
def test_compiled_models_tell_documents_by_positions_too(name):
    model, rows = _model(name), POSITIONS[:1]  # one row of positions for all
    wanted = [model(TOKENS, position_ids=x).last_hidden_state for x in (rows, torch.arange(12)[None])]
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="eager")
    for positions, states in zip((rows, torch.arange(12)[None]), wanted, strict=True):
        assert relative_error(call(TOKENS, position_ids=positions).last_hidden_state, states) < 3e-6


def test_a_compiler_tells_the_classes_apart():
    # torch.compile remembers by these three which sizes and numbers vary.
    codes = [vars(kind)["forward"].__code__ for kind in (LlamaModel, LlamaForCausalLM, BertModel)]
    assert len({(code.co_filename, code.co_firstlineno, code.co_name) for code in codes}) == 3


def test_a_mask_beside_positions_says_that_they_are_no_documents():
    """As in transformers; and what one call said is gone after it, also if it failed."""
    model = _model("bert")
    inputs = {"input_ids": TOKENS, "position_ids": POSITIONS, "attention_mask": torch.ones_like(TOKENS)}
    assert not probe(model, inputs, IDS).isolated
    wanted = model(TOKENS).last_hidden_state
    with pytest.raises(IndexError):
        model(TOKENS + 64, position_ids=POSITIONS)
    assert torch.equal(model(TOKENS).last_hidden_state, wanted)


def test_positions_given_by_place_and_to_a_model_inside_another():
    model = build("bert", "AutoModelForMaskedLM")
    model.set_attn_implementation("attnspan")
    wanted = model.bert(TOKENS, position_ids=POSITIONS).last_hidden_state
    assert torch.equal(model.bert(TOKENS, None, None, POSITIONS).last_hidden_state, wanted)
    assert torch.equal(model(TOKENS, position_ids=POSITIONS).logits, model.cls(wanted))


def _with_past(model, **inputs):
    """The states of tokens behind three keys that a prefix tuning brings."""
    torch.manual_seed(0)
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 16), layer)
    return model(TOKENS, past_key_values=cache, **inputs).last_hidden_state


@pytest.mark.parametrize(
    "name", ["bert", "roberta", *(pytest.param(x, marks=pytest.mark.long) for x in ("electra", "camembert"))]
)
def test_encoders_see_keys_of_a_prefix(name):
    """transformers does not count them: it makes a mask of the new tokens, or none."""
    model = build(name, "AutoModel", **({"embedding_size": 32} if name == "electra" else {}))
    whole = torch.ones(2, 15, dtype=torch.long)
    whole[0, 12:] = 0
    for mask in (None, torch.ones_like(TOKENS), whole):
        model.set_attn_implementation("eager")
        wanted = _with_past(model, attention_mask=mask)
        model.set_attn_implementation("attnspan")
        with Watching() as operators:
            got = _with_past(model, attention_mask=mask)
        assert operators.counts[FORWARD] == 2
        assert relative_error(got, wanted) < 3e-6


def test_a_mask_of_the_new_tokens_alone_is_refused_beside_a_prefix():
    model, mask = _model("bert"), torch.ones_like(TOKENS)
    mask[0, 9:] = 0
    text = "a mask for 15 keys, got 12. Pass an attention_mask with an entry for each key, cached keys too"
    with pytest.raises(ValueError, match=text):
        _with_past(model, attention_mask=mask)
