"""Decoders of transformers: the eager implementation's results, by our operator, in one graph."""

import pytest
import torch
from closeness import relative_error
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

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
IDS = (POSITIONS == 0).cumsum(1)


def _valid(given):
    return given.get("attention_mask", torch.ones(2, 12)).bool()


#: Gemma 3 has windows too, and Llama rotary positions.
ALIKE = ("mistral", "gptj")
NAMES = [pytest.param(x, marks=pytest.mark.long if x in ALIKE else ()) for x in DECODERS]


@pytest.mark.covering(1)
@pytest.mark.parametrize("given", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("name", NAMES)
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


CU = torch.tensor([0, 7, 9, 12], dtype=torch.int32)
#: Packed documents as the first model's eager attention gets them, and as attnspan may be told of them.
TOLD = {
    "gemma3_text": {"position_ids": POSITIONS},  # The model makes a cache.
    "llama": {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "use_cache": False},
    "llama4_text": INPUTS["left padding"],
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TOLD)
def test_documents_by_positions_and_by_offsets_and_padding_in_one_graph(name, compiled):
    # Each layer takes seconds to compile; Gemma has windows in every other one.
    model, given = build(name, num_hidden_layers=2 if name == "gemma3_text" else 1), TOLD[name]
    model.set_attn_implementation("eager")
    wanted = model(TOKENS, **(given if name == "llama4_text" else INPUTS["packed"])).logits
    model.set_attn_implementation("attnspan")
    if name == "llama":  # Positions that go on leave the offsets alone to tell.
        rope = model.model.rotary_emb
        forward = rope.forward
        rope.forward = lambda x, **_: forward(x, POSITIONS)
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    got, valid = call(TOKENS, **given), _valid(given)
    assert relative_error(got.logits[valid], wanted[valid]) < 3e-6
    assert name != "gemma3_text" or got[CACHE].get_seq_length() == TOKENS.shape[1]


LONG = 1024
STARTS = torch.tensor([0, 300, 301, 700, LONG], dtype=torch.int32)
PACKED = {
    "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in STARTS.diff().tolist()])[None]},
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
    model.set_attn_implementation("attnspan")
    if compiled:
        torch._dynamo.reset()
        seen = []
        compiler = lambda graph, _: _largest(graph, seen)  # noqa: E731
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        torch.compile(model, fullgraph=True, backend=backend)(**inputs).logits.pow(2).mean().backward()
        assert len(seen) == 2
    else:
        with Watching(_named_with_size) as operators:
            model(**inputs).logits.pow(2).mean().backward()
        assert [sum(name == x for name, _ in operators.seen) for x in (FORWARD, BACKWARD)] == [1, 1]
        seen = [size for _, size in operators.seen]
    assert max(seen) <= LONG * 128
    # The check sees such tensors.
    model.set_attn_implementation("eager")
    with Watching(_named_with_size) as operators, torch.no_grad():
        model(**inputs)
    assert max(size for _, size in operators.seen) >= LONG * LONG


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
def test_packed_documents_do_not_see_each_other(name):
    model = build(name)
    model.set_attn_implementation("attnspan")
    assert_isolated(model, {"input_ids": TOKENS, **INPUTS["packed"]}, IDS)


MODELS = {"llama": "AutoModelForCausalLM", "gemma2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}
#: Among them the widths of masks with one interval and with eight, which once were special.
LENGTHS = (12, 20, 4, 18)


class _Logits(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        layers = 2 if name == "gemma2" else 1  # Windows are in every other layer.
        self.model = build(name, MODELS[name], num_hidden_layers=layers).requires_grad_(False)
        self.options = {} if name == "bert" else {"use_cache": False}

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options).logits


def _inputs(length, padded):
    tokens = {"input_ids": torch.arange(2 * length).reshape(2, length) % 60 + 3}
    valid = torch.ones(2, length, dtype=torch.long)
    valid[0, length - 2 :] = 0
    return {**tokens, "attention_mask": valid} if padded else tokens


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["marked", "found", "exported by name", "exported"])
def test_one_program_takes_any_length(how, name, padded):
    """As with SDPA: masks ask no length whether it is some number."""
    model, counter = _Logits(name), CompileCounterWithBackend("eager")
    model.model.set_attn_implementation("attnspan")
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend=counter)
    if how.startswith("exported"):
        length = Dim("length", min=3, max=100) if how == "exported by name" else Dim.AUTO
        inputs = _inputs(12, padded)
        call = export(
            model, (), inputs, dynamic_shapes={x: {1: length} for x in inputs}, strict=False
        ).module()
    for length in LENGTHS:
        inputs = _inputs(length, padded)
        valid = inputs.get("attention_mask", torch.ones(2, length)).bool()
        model.model.set_attn_implementation("eager")
        wanted = model(**inputs)[valid]
        model.model.set_attn_implementation("attnspan")
        for x in inputs.values() if how == "marked" else ():
            torch._dynamo.mark_dynamic(x, 1)
        assert relative_error(call(**inputs)[valid], wanted) < 3e-6
    assert counter.frame_count == {"marked": 1, "found": 2}.get(how, 0)
