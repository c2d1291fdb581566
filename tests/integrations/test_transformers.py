"""Decoders of transformers: the eager implementation's results, by our operator, in one graph."""

import pytest
import torch
from closeness import relative_error
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("transformers")

from transformers_models import (
    BACKWARD,
    CACHE,
    DECODERS,
    FORWARD,
    LEFT_PADDED,
    POSITIONS,
    TOKENS,
    assert_equals_eager,
    build,
    computed,
    logits,
)
from watching import Watching, tensors_of

import attnspan.integrations.transformers  # noqa: F401
from attnspan.testing import assert_isolated

INPUTS = {
    "plain": {},
    "left padding": {"attention_mask": LEFT_PADDED},
    "packed": {"position_ids": POSITIONS, "use_cache": False},
}


def _valid(given):
    return given.get("attention_mask", torch.ones(2, 12)).bool()


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_compute_what_eager_attention_does(name, given):
    model = build(name)
    layers = model.config.num_hidden_layers
    assert_equals_eager(model, {"input_ids": TOKENS, **given}, layers, valid=_valid(given))


def test_chunks_start_at_the_first_token_of_each_row():
    """Chunks of 5 with 4 tokens of padding: those of the two rows differ."""
    model = build("llama4_text")
    inputs = {"input_ids": TOKENS[:1].expand(2, -1), "attention_mask": LEFT_PADDED}
    assert_equals_eager(model, inputs, 4, valid=LEFT_PADDED.bool())
    chunked = computed(model, "attnspan", inputs, logits)[0]
    # Moved to the left, the padded row has the same chunks, so its last token sees the same ones.
    moved = model(input_ids=TOKENS[:1, 4:]).logits
    assert relative_error(chunked[:1, 4:], moved) < 3e-6


@pytest.mark.slow  # test_transformers_lengths.py compiles models without padding.
@pytest.mark.parametrize(("name", "inputs"), [("gemma3_text", "packed"), ("llama4_text", "left padding")])
def test_models_are_one_graph(name, inputs):
    model, given = build(name), INPUTS[inputs]
    valid = _valid(given)
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, **given).logits
    model.set_attn_implementation("attnspan")
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="eager")(TOKENS, **given).logits
    assert relative_error(got[valid], wanted[valid]) < 3e-6


LONG = 1024
STARTS = torch.tensor([0, 300, 301, 700, LONG], dtype=torch.int32)
LENGTHS = STARTS.diff().tolist()
PACKED = {
    "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
    "cu_seq_lens": {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS},
}


def _named_with_size(operator, _, result):
    return str(operator), max((x.numel() for x in tensors_of(result)), default=0)


def _largest(graph, seen):
    """Keep the size of the largest tensor of a program, and run it."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    seen.append(max(x.numel() for x in tensors_of(values)))
    return make_boxed_func(graph.forward)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("given", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_training_makes_no_tensor_of_all_pairs(compiled, given):
    """The largest tensor of a step, forward and backward, is linear in the number of tokens."""
    model = build("llama", max_position_embeddings=LONG, vocab_size=128, num_hidden_layers=1)
    inputs = {"input_ids": torch.arange(LONG)[None] % 60 + 3, "use_cache": False, **given}
    if compiled:
        torch._dynamo.reset()
        seen: list[int] = []
        compiler = lambda graph, _: _largest(graph, seen)  # noqa: E731
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        model.set_attn_implementation("attnspan")
        torch.compile(model, fullgraph=True, backend=backend)(**inputs).logits.pow(2).mean().backward()
        assert len(seen) == 2
        assert max(seen) <= LONG * 128
    else:
        model.set_attn_implementation("attnspan")
        with Watching(_named_with_size) as operators:
            model(**inputs).logits.pow(2).mean().backward()
        assert [sum(name == x for name, _ in operators.seen) for x in (FORWARD, BACKWARD)] == [1, 1]
        assert max(size for _, size in operators.seen) <= LONG * 128
    # The check sees such tensors.
    model.set_attn_implementation("eager")
    with Watching(_named_with_size) as operators, torch.no_grad():
        model(**inputs)
    assert max(size for _, size in operators.seen) >= LONG * LONG


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
def test_packed_documents_do_not_see_each_other(name):
    model = build(name)
    model.set_attn_implementation("attnspan")
    ids = (POSITIONS == 0).cumsum(1)
    assert_isolated(model, {"input_ids": TOKENS, **INPUTS["packed"]}, ids)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_positions_tell_documents_whether_or_not_the_model_makes_a_cache(name, compiled):
    model = build(name)
    model.set_attn_implementation("attnspan")
    wanted = model(TOKENS, position_ids=POSITIONS, use_cache=False).logits
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    got = call(TOKENS, position_ids=POSITIONS)
    assert got[CACHE].get_seq_length() == TOKENS.shape[1]
    assert relative_error(got.logits, wanted) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_offsets_of_documents_without_positions(compiled):
    model = build("llama", num_hidden_layers=1)
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, **INPUTS["packed"]).logits
    model.set_attn_implementation("attnspan")
    cu = torch.tensor([0, 7, 9, 12], dtype=torch.int32)
    # Positions that go on leave the offsets alone to tell.
    rope = model.model.rotary_emb
    forward = rope.forward
    rope.forward = lambda x, **_: forward(x, POSITIONS)
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    got = call(TOKENS, cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False).logits
    assert relative_error(got, wanted) < 3e-6
