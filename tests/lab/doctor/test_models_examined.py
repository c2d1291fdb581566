"""Healthy models have no finding. What was not checked has a reason, and remedies depend on the model."""

import importlib

import pytest
import torch
from sick_axes import TOKENS_FIRST
from sick_compiler import ByInference
from sick_costs import SHARED, dropout, narrow_rotated, shared
from sick_padding import PADDED, ours, shows_real
from sick_positions import counted
from sick_scales import queries_too
from sick_steps import Checkpointed, SavedByName, always, distilled, narrow_softmax
from small_models import (
    CAUSAL,
    DIM,
    HEADS,
    IDS,
    LENGTH,
    SDPA,
    VOCABULARY,
    Block,
    Model,
    builder,
    fused,
    heads_of,
    latents,
    merged_heads,
    model_of,
    of_segments,
    tokens,
    written,
)
from torch import nn
from torch_runner import CASES, case_finding, examined, found_in, grave, lines_of

from attnspan import causal
from attnspan.torch import attention
from attnspan_lab.doctor import Finding, process, run
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.isolation import axes, samples
from attnspan_lab.doctor.torch.isolation.mixing_remedies import of_operator
from attnspan_lab.doctor.torch.masks.call_costs import with_caller
from attnspan_lab.doctor.torch.recording import watch
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import recorded
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow

# Healthy models


class Multihead(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.inner(x, x, x, need_weights=False)[0]


def by_attnspan(q, k, v):
    return attention(q, k, v, mask=causal())


HEALTHY = {
    "torch": model_of(lengths=(24, 40, 33)),
    "attnspan": model_of(by_attnspan, lengths=(24, 40, 33)),
    "documents": model_of(of_segments, batch={"segment_ids": IDS}),
    "shared heads": model_of(shared, **SHARED),
    "bfloat16": model_of(narrow_rotated, dtype=torch.bfloat16),
    "saved attention": model_of(block=SavedByName),
    "multihead": model_of(block=Multihead, expected={}),
    "padding": model_of(ours, **PADDED),
}


@SLOW
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_no_finding_in_any_stage(name):
    assert [examined(HEALTHY[name], x)[0] for x in ("eager", "compiled", "parity")] == [(), (), ()]


@builder
def unused():
    """A parameter that no result depends on, as an unused pooler."""
    model = Model(narrow_softmax)
    model.pooler = nn.Linear(DIM, DIM)
    return model, tokens(), {}


class Samples(Block):
    def forward(self, x):
        return super().forward(torch.bernoulli(x.sigmoid()) + x)


class Losing(nn.Module):
    """A second sequence that only the loss depends on."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)

    def forward(self, x, y):
        out = self.block(self.embed(x))
        return out, (out - self.embed(y)).square().mean()


@builder
def losing():
    ids = tokens()[0]["input_ids"]
    return Losing(), [{"x": ids, "y": ids.flip(1)}], {}


class Video(nn.Module):
    """Patches of a video whose sides are as long as the padded caption."""

    def __init__(self):
        super().__init__()
        self.patches, self.caption = nn.Conv3d(4, DIM, (1, 4, 4), (1, 4, 4)), nn.Linear(8, DIM)

    def forward(self, video, caption, caption_mask):
        x, y = self.patches(video).flatten(2).mT[:, None], self.caption(caption)[:, None]
        return (x + shows_real(x, y, y, caption_mask))[:, 0]


@builder
def video():
    shown = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    batch = {"video": torch.randn(2, 4, 2, 12, 12), "caption": torch.randn(2, 12, 8), "caption_mask": shown}
    return Video(), [batch], {}


@SLOW
def test_right_models_that_look_sick_are_not_accused():
    def scaled_by_its_size(q, k, v):
        return fused(q / (1 + q.detach().abs().mean()), k, v)

    assert grave(examined(model_of(scaled_by_its_size))[0]) == []
    assert grave(examined(unused())[0]) == []
    assert "dropout-in-eval" not in {x.kind for x in examined(model_of(block=Samples))[0]}
    assert "upcast" not in {x.kind for x in examined(model_of(narrow_softmax, dtype=torch.bfloat16))[0]}
    assert examined(distilled("frozen"))[0] == ()
    found, facts = examined(losing())
    assert grave(found) == []
    assert facts["checked"]["inputs"] == "each tensor was changed alone"
    found, facts = examined(video())
    assert grave(found) == []
    assert "padding outside of attention" not in facts["unchecked"]


@SLOW
@pytest.mark.parametrize("name", ["detach", "operator"])
def test_equal_steps_without_a_gradient_have_parity(name):
    assert examined(CASES[f"no-gradient: {name}"].made, "parity")[0] == ()


def test_results_that_are_random_in_evaluation_mode_are_not_compared():
    found, facts = examined(model_of(always), "parity")
    assert (found, facts) == (
        (),
        {"unchecked": {"compiled results": "the model is random in evaluation mode"}},
    )


@SLOW
def test_equal_records_of_positions_are_checked():
    assert "digits of positions" in examined(counted("well"))[1]["checked"]


# Facts about checks


class Grouped(nn.Module):
    """Attention within groups of tokens, as over the patches of each frame of a video."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, DIM), Block(SDPA)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.block(x.reshape(-1, 6, DIM)).view(x.shape)


@builder
def grouped():
    return Grouped(), tokens(), {}


@SLOW
def test_attention_within_groups_of_tokens_says_what_was_not_examined():
    topic = "grouping of tokens"
    said = examined(grouped())[1]["unchecked"][topic]
    assert "attends within 8 sequences of 6 tokens, made from 2 samples" in said
    facts = examined(latents())[1]
    assert topic not in facts["unchecked"]
    assert "scale of scores" in facts["checked"]


@SLOW
@pytest.mark.parametrize("made", TOKENS_FIRST)
def test_a_model_whose_tokens_come_first_is_not_accused(made):
    assert "which may be the sequence" in examined(made)[1]["unchecked"]["samples"]


@SLOW
def test_random_numbers_in_evaluation_mode_are_no_place_in_the_batch():
    case = CASES["recompute-random: OwnNumbers"]
    for factory in (case.made, *case.twins):
        found, facts = examined(factory)
        assert "sample-axis" not in {x.kind for x in found}
        assert "draws random numbers" in facts["unchecked"]["order of samples"]


class Images(nn.Module):
    """A classifier of images. Its patches are the tokens, and no input has them."""

    def __init__(self, mixes):
        super().__init__()
        self.patch, self.block, self.mixes = nn.Conv2d(3, DIM, 4, 4), nn.Linear(DIM, 3 * DIM), mixes

    def forward(self, images):
        x = self.patch(images).flatten(2).mT
        x = merged_heads(SDPA(*map(heads_of, self.block(x).chunk(3, -1)))).mean(1)
        return x - x.mean(0) if self.mixes else x


@builder
def images(mixes):
    return Images(mixes), [{"images": torch.randn(3, 3, 16, 16)}]


@pytest.mark.slow
def test_samples_of_images_are_compared():
    _, facts = examined(images(False))
    assert facts["checked"]["samples"] == "a changed sample changes the results of no other sample"
    _, facts = examined(images(True))
    assert facts["checked"]["samples"].startswith("a changed sample changes the results of 2 other samples")
    _, facts = examined(distilled("frozen"))
    assert facts["unchecked"]["samples"] == "no result has a row for each of the 2 samples"


def without_padding(batch, row):
    """The sample alone, in float64."""
    mask = batch.get("attention_mask", torch.ones(len(next(iter(batch.values()))), 1))
    length, real = mask.shape[1], int(mask[row].sum())
    found = {}
    for name, x in batch.items():
        x = x[row : row + 1].double() if x.is_floating_point() else x[row : row + 1]
        dims = [i for i, n in enumerate(x.shape) if n == length > 1]
        found[name] = x.narrow(dims[0], 0, real) if dims else x
    return found


_REACHING = (
    "mask-lost: last",
    "mask-lost: mean",
    "mask-lost: maximum",
    "sample-axis: Pl",
    "sample-axis: Emb",
)
_REACHING += (
    "sample-axis: Slo",
    "ignored-input: ",
    "mask-lost: mask of channels first, 32",
    "mask-lost: mask of channels last",
)


@SLOW
@pytest.mark.parametrize("name", [x for x in CASES if x.startswith(_REACHING)])
def test_a_mended_sample_has_the_results_that_it_has_alone(name):
    """Exact results are the model's in float64 for one sample without padding."""
    sick, well = CASES[name].made, CASES[name].twins[0]
    errors = []
    for factory in (well, sick):
        model, (batch, *_), _ = factory()
        row = len(next(iter(batch.values()))) - 1
        with torch.no_grad():
            found = model(**batch)[row].double()
            exact_model = well()[0].double()
            if hasattr(exact_model, "table"):
                exact_model.table = exact_model.table.double()
            exact = exact_model(**without_padding(batch, row))[0]
        found = found[: len(exact)]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[0] < 1e-5
    assert errors[1] > 1e-2


# Checks that raise


def broken(*_, **__):
    raise RuntimeError("sizes must match")


@pytest.mark.parametrize(
    ("module", "name", "topic"),
    [(samples, "_others", "samples"), (axes, "source_of", "axes"), (watch, "fused", "operators")],
)
def test_a_check_that_raises_is_named_and_ends_no_stage(monkeypatch, module, name, topic):
    monkeypatch.setattr(module, name, broken)
    found, facts = examined.__wrapped__(model_of())
    assert found == ()
    assert "RuntimeError: sizes must match" in facts["unchecked"][topic]
    assert ("Your own step does not raise" in facts["unchecked"][topic]) == (topic != "operators")
    assert "gradients" in facts["checked"]


_TRACE = """Traceback (most recent call last):
  File "/home/me/model.py", line 3, in forward
    y = x + z
{}RuntimeError: sizes must match
"""
_DISPATCH = f'  File "{watch.__file__}", line 7, in {{}}\n    out = op()\n'


def test_the_code_that_raised_is_named():
    found = process._crash(_TRACE.format(""), 1, "running", ())
    said = "This line raised an error while the doctor ran the model again: RuntimeError: sizes must match"
    assert found.what == said
    assert found.places == (Place("/home/me/model.py", 3, "forward"),)
    passed = _TRACE.format(_DISPATCH.format("__torch_dispatch__"))
    assert process._crash(passed, 1, "running", ()).what == said
    found = process._crash(_TRACE.format(_DISPATCH.format("_note")), 1, "running", ())
    assert found.what == "The doctor raised an error while running: RuntimeError: sizes must match"
    assert found.cause.endswith("This says nothing about your model")
    assert "sys.exit()" not in found.remedy


# The model's own state, and what a prefill shares with decode steps


class CountingTokens(Model):
    """A decoder whose position grows with each call, and that has little room."""

    def __init__(self):
        super().__init__(fused)
        self.position, self.table, self.seen = 0, nn.Embedding(3 * LENGTH, DIM), []

    def forward(self, input_ids):
        places = torch.arange(self.position, self.position + input_ids.shape[1])
        self.position += input_ids.shape[1]
        self.seen.append(self.position)
        return self.head(self.mixed(self.embed(input_ids) + self.table(places)))


@SLOW
def test_the_doctors_own_steps_leave_the_state_of_a_model_alone():
    model = CountingTokens()
    found, facts = examined(lambda: (model, tokens((LENGTH, LENGTH - 4)), CAUSAL))
    assert {x.kind for x in found} <= {"state"}  # The position is state of earlier calls.
    assert not {"axes", "samples", "attention"} & set(facts["unchecked"])
    assert (model.position, model.seen) == (2 * LENGTH - 4, [LENGTH, 2 * LENGTH - 4])


class StaticDecoder(nn.Module):
    """A static cache. The prefill and each decode step share the line of attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 3 * DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.register_buffer("cache", torch.zeros(2, 2, HEADS, 2 * LENGTH, DIM // HEADS))

    @torch.no_grad()
    def forward(self, tokens, start_pos):
        q, k, v = map(heads_of, self.qkv(self.embed(tokens)).chunk(3, -1))
        stop = start_pos + tokens.shape[1]
        self.cache[0, :, :, start_pos:stop], self.cache[1, :, :, start_pos:stop] = k, v
        mask = start_pos + torch.arange(tokens.shape[1])[:, None] >= torch.arange(stop)  # sick
        return self.head(merged_heads(SDPA(q, *self.cache[:, :, :, :stop], mask)))


class FrozenConfig(dict):
    """A config as diffusers has it."""

    def __setitem__(self, *_):
        raise RuntimeError

    update = __setitem__


@SLOW
def test_a_form_of_the_prefill_is_tried_on_decode_steps():
    ids, model = tokens((LENGTH + 1,))[0]["input_ids"], StaticDecoder()
    model.config = FrozenConfig(layers=2)
    batches = [{"tokens": ids[:, :LENGTH], "start_pos": 0}, {"tokens": ids[:, LENGTH:], "start_pos": LENGTH}]
    ((found,), _) = examined(lambda: (model, batches, CAUSAL))
    assert [found.places[0].line] == lines_of(StaticDecoder)
    assert found.remedy == "Pass mask=causal() to attnspan.torch.attention"
    refused = "is_causal=True, without attn_mask: it would change results of 1 of 2 calls of this line"
    assert refused in found.tried
    assert model.config == {"layers": 2}  # It cannot be written, so it is left alone.


# Remedies that depend on the model


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_that_a_checkpoint_repeats_is_the_same_call(reentrant):
    """torch's function decomposes into products and a softmax, in the backward pass too."""

    class Repeated(Checkpointed):
        options = {"use_reentrant": reentrant}  # noqa: RUF012

    def attend(q, k, v):
        return SDPA(q, k, v, dropout_p=0.1, is_causal=True)

    found, measured = examined(model_of(attend, Repeated, {}, layers=2))
    unfused, again = [x for x in found if x.kind in ("unfused", "dense-mask", "recompute")]
    assert (unfused.kind, again.kind) == ("unfused", "recompute")
    assert unfused.what.startswith("scaled_dot_product_attention ran its math kernel")
    assert measured["attention calls"] == 2
    assert again.evidence == ("2 calls in the forward pass, 2 more in the backward pass",)


def test_dropout_is_kept_in_training_and_dropped_in_evaluation():
    trained, evaluated = (
        found_in(lambda mode=x: (Model(dropout).train(mode), tokens()), "unfused") for x in (True, False)
    )
    assert trained.remedy.startswith("Call attnspan.torch.attention")
    assert "changes training" in trained.remedy
    assert evaluated.remedy == "Pass dropout_p=0.0"
    assert all(x.tried.startswith("with dropout_p=0.0, ") for x in (trained, evaluated))


def read(file):
    return Finding("sync", "A value of a tensor is read on the host here", (Place(file, 3),), stage="eager")


_LIBRARY_FILE, _WHOLE = "/x/site-packages/transformers/a.py", {"compiled": {"breaks": 0}}


@pytest.mark.parametrize(
    ("file", "facts", "left"),
    [(_LIBRARY_FILE, _WHOLE, 0), (_LIBRARY_FILE, {}, 1), ("/x/model.py", _WHOLE, 1)],
)
def test_reads_that_a_library_guards_are_left_out(file, facts, left):
    assert len(run._completed([read(file)], facts)) == left


def test_reads_of_a_library_that_break_the_graph_stay():
    broken = Finding("graph-break", "The graph breaks here", (Place(_LIBRARY_FILE, 3),), stage="compiled")
    assert len(run._completed([read(_LIBRARY_FILE), broken], {"compiled": {"breaks": 1}})) == 2


# Lines and records


@SLOW
@pytest.mark.parametrize("attend", [fused, written])
def test_attention_in_inference_mode_is_seen(attend):
    facts = examined(model_of(attend, block=ByInference, expected={}))[1]
    assert facts["attention calls"] == 1
    assert facts["checked"]["attention"] == "1 call a step"


def test_the_users_line_that_calls_a_library_is_named():
    files = (
        "/x/site-packages/transformers/sdpa.py",
        "/x/site-packages/transformers/llama.py",
        "/home/me/train.py",
    )
    lines = [f"{x}:{i}" for i, x in enumerate(files, 3)]
    call = Attention("sdpa", "", None, (1,), (1,), torch.float32, lines=["/x/bin/attnspan:8", *lines])
    found = with_caller(Finding("leak", "", (Place(files[0], 3),)), [call])
    assert list(map(str, found.places)) == [lines[0], lines[2]]
    own = Finding("leak", "", (Place(files[2], 5),))
    assert with_caller(own, [call]) == own


_LIBRARY = """
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

def copied(x):
    if x.sum().item() > 1e9:
        return x
    return x.repeat_interleave(4, 1)

class OfLibrary(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + sdpa(q, copied(k[:, :1]), copied(v[:, :1])).transpose(1, 2).flatten(2)
"""


@SLOW
def test_a_librarys_line_is_named_only_if_the_library_has_the_model(tmp_path, monkeypatch):
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "library_of_test.py").write_text(_LIBRARY)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("library_of_test")

    def attend(q, k, v):
        k = library.copied(k[:, :1])  # called
        return SDPA(q, k, library.copied(v[:, :1]))

    called = lines_of((attend, "# called"))
    for kind, stage, line in (("kv-copy", "eager", 8), ("graph-break", "compiled", 6)):
        own = found_in(latents(attend), kind, stage).places
        of_library = found_in(latents(block=library.OfLibrary), kind, stage).places
        assert (own[0].file, [own[0].line]) == (__file__, called)
        assert (of_library[0].file, of_library[0].line) == (library.__file__, line)


@SLOW
def test_lines_of_both_factors_of_a_scale_are_in_the_remedy():
    first, second = lines_of(queries_too)
    said = f"Remove the one at sick_scales.py:{first}, or pass scale=1.0 at sick_scales.py:{second}"
    assert said in case_finding("scale: queries_too").remedy


@SLOW
def test_a_record_follows_multihead_attention():
    x = torch.randn(2, 7, DIM)
    (call,) = recorded(Subject(Multihead(None), [x]), x, ()).calls
    assert call.modules == ("", "inner")
    assert call.rows.shape == (2, 4, 7, 8)


def test_padding_that_an_unknown_operator_reads_has_a_remedy_for_all_layers() -> None:
    cause, remedy = of_operator("attention_mask", "")
    assert "no operator" in cause
    assert remedy.startswith("Set padding to 0 before layers that mix tokens")
    assert "attention_mask[..., None]" in of_operator("attention_mask", "cumsum")[1]
