"""Generation by models of transformers: the eager implementation's tokens and scores, step by step."""

import runpy
from pathlib import Path

import pytest
import torch
from closeness import relative_error

transformers = pytest.importorskip("transformers")

from transformers_models import (  # noqa: E402
    CACHE,
    DECODERS,
    FORWARD,
    LEFT_PADDED,
    RIGHT_PADDED,
    TOKENS,
    build,
)
from watching import Watching  # noqa: E402

import attnspan.integrations.transformers  # noqa: E402, F401

STEPS = 10
#: A prompt longer than windows and chunks, and a shorter one, after which they are left later.
PROMPTS = {
    "long": {"input_ids": TOKENS, "attention_mask": LEFT_PADDED},
    "short": {"input_ids": TOKENS[:, :3], "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
}
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}


def _generated(model, implementation, inputs, **options):
    """Tokens, scores of each step, and how often our operator ran."""
    model.set_attn_implementation(implementation)
    steps = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    shown = {"return_dict_in_generate": True, "output_logits": True}
    with Watching() as operators:
        found = model.generate(**inputs, **steps, **shown, **options)
    return found.sequences, torch.stack(found.logits), operators.counts[FORWARD]


def _assert_equal_generation(model, inputs, calls, **options):
    wanted = _generated(model, "eager", inputs, **options)
    tokens, scores, ran = _generated(model, "attnspan", inputs, **options)
    assert torch.equal(tokens, wanted[0])
    assert relative_error(scores, wanted[1]) < 3e-6
    assert ran == calls


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_search_beyond_windows_and_chunks(name, cache, prompt):
    model = build(name)
    _assert_equal_generation(model, prompt, STEPS * model.config.num_hidden_layers, **cache)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
def test_beams(name, cache):
    model, found = build(name), []
    for implementation in ("eager", "attnspan"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": STEPS, "do_sample": False, "num_beams": 3, **cache}
        found.append(model.generate(**PROMPTS["long"], **options))
    assert torch.equal(*found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bart", {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "forced_eos_token_id": None}),
        ("t5", {"d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 96}),
    ],
    ids=["bart", "t5"],
)
def test_decoders_of_padded_encoders(name, sizes, cache):
    model = build(name, "AutoModelForSeq2SeqLM", decoder_start_token_id=1, **sizes)
    inputs = {"input_ids": TOKENS, "attention_mask": RIGHT_PADDED}
    _assert_equal_generation(model, inputs, 2 + STEPS * 4, **cache)


@pytest.mark.slow
def test_images_inside_windows_and_a_static_cache():
    """`generate` makes the masks ahead, of the groups of the prompt and beyond."""
    from test_transformers_kinds import GROUPS, IMAGES
    from transformers_models import SIZES

    types, sizes, _ = GROUPS["gemma3"]
    text = {**SIZES, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model = build("gemma3", "AutoModelForImageTextToText", text_config=text, **sizes)
    inputs = {"input_ids": TOKENS % 50 + 3, types: IMAGES, "attention_mask": LEFT_PADDED}
    _assert_equal_generation(model, inputs, STEPS * 2, **CACHES["static"])


@pytest.mark.parametrize("accepts", [True, False], ids=["accepted", "rejected"])
def test_assisted_decoding(accepts):
    """Steps check several tokens at once, after a cache; rejected ones are cut off."""
    model, tokens = build("llama"), TOKENS[:1]
    torch.manual_seed(1)
    assistant = model if accepts else type(model)(model.config).eval()
    model.set_attn_implementation("eager")
    wanted = model.generate(tokens, max_new_tokens=STEPS, do_sample=False)
    model.set_attn_implementation("attnspan")
    assistant.set_attn_implementation("attnspan")
    lengths = []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, __: lengths.append(args[0].shape[1]))
    with Watching() as operators:
        got = model.generate(tokens, assistant_model=assistant, max_new_tokens=STEPS, do_sample=False)
    hook.remove()
    assert torch.equal(got, wanted)
    assert operators.counts[FORWARD] > 0
    assert any(1 < n < tokens.shape[1] for n in lengths)


def test_a_prompt_in_pieces():
    """Queries that continue a dynamic cache see what they see in one piece."""
    for name in ("llama", "gemma3_text", "llama4_text"):
        model = build(name)
        model.set_attn_implementation("attnspan")
        wanted, cache, found = model(TOKENS, attention_mask=LEFT_PADDED).logits, None, []
        for first, last in ((0, 6), (6, 7), (7, 12)):
            out = model(TOKENS[:, first:last], attention_mask=LEFT_PADDED[:, :last], **{CACHE: cache})
            cache = out[CACHE]
            found.append(out.logits)
        valid = LEFT_PADDED.bool()
        assert relative_error(torch.cat(found, 1)[valid], wanted[valid]) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"), [("llama", 1), pytest.param("gemma3_text", 2, marks=pytest.mark.long)]
)
def test_a_static_cache_in_compiled_code(name, times):
    """`generate` makes the masks and calls the compiled step, which holds our operator once for each layer.

    A window is compiled twice, once for a full cache, whatever the attention.
    """
    model, programs = build(name), []
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    wanted = model.generate(**PROMPTS["long"], **options)
    model.set_attn_implementation("attnspan")

    def backend(graph, _):
        programs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    config = transformers.CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    got = model.generate(**PROMPTS["long"], **options, cache_implementation="static", compile_config=config)
    assert torch.equal(got, wanted)
    assert [sum("attnspan" in target for target in targets) for targets in programs] == [2] * times


@pytest.mark.slow
def test_the_example_generates_what_eager_attention_does(monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "generate_static_cache.py"
    monkeypatch.setattr("sys.argv", [str(example), "--compare", "--tokens", "20"])
    with Watching() as operators:
        runpy.run_path(str(example), run_name="__main__")
    *rows, equal = capsys.readouterr().out.splitlines()
    assert [len(row.split(",")) for row in rows] == [20, 20]
    assert equal == "equal to eager: True"
    assert operators.counts[FORWARD] == 20 * 4
