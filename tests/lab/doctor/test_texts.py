"""Statements of findings that once were false: causes, figures and settings, with their right values."""

from __future__ import annotations

import json
from pathlib import Path

import missed
import patients
import pytest
import remedied
import torch
from patients import DIM, HEADS, LENGTH, Block, Model, fused, tokens
from test_remedied import examined
from torch import nn

from attnspan_lab.doctor import Finding, Place, child, process, run
from attnspan_lab.doctor.timing import unused
from attnspan_lab.doctor.torch import matrix, ranks
from attnspan_lab.doctor.torch.matrix import Cell
from attnspan_lab.doctor.torch.recording.compiler import CompilerLog, compile_error
from attnspan_lab.doctor.torch.steps import run_compiled
from attnspan_lab.doctor.torch.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")
SLOW = pytest.mark.slow


def first(factory, kind, stage="eager"):
    return next(x for x in examined(factory, stage) if x.kind == kind)


# Masks


def knows_nothing(q, k, v, segment_ids):
    return remedied.SDPA(q, k, v, attn_mask=remedied.EARLIER)


def later_documents(q, k, v, segment_ids):
    shown = segment_ids[:, None, :, None] >= segment_ids[:, None, None]
    return remedied.SDPA(q, k, v, attn_mask=shown & remedied.EARLIER)


@SLOW
@pytest.mark.parametrize(
    ("attend", "cause"),
    [
        (remedied.documents, "This call has no mask except is_causal=True"),
        (knows_nothing, "This call's mask is not made from documents"),
        (later_documents, "is made from segment_ids, but it shows pairs of different documents"),
    ],
)
def test_why_documents_are_seen(attend, cause):
    found = first(lambda: (Model(attend), tokens(segment_ids=remedied.IDS), patients.CAUSAL), "leak")
    assert found.cause.endswith(cause)


@SLOW
@pytest.mark.parametrize(
    ("attend", "cause"),
    [
        (remedied.shifted, "This call's mask also shows each token the next token"),
        (remedied.inverted, "The causal mask is inverted: it shows later tokens and hides earlier ones"),
        (lambda q, k, v: remedied.SDPA(q, k, v), "This call has no mask"),
    ],
)
def test_why_later_tokens_are_seen(attend, cause):
    found = first(missed.model_of(attend), "causality-lost")
    assert found.cause == cause
    assert found.remedy == "Pass is_causal=True. Or: pass mask=causal() to attnspan.torch.attention"
    assert found.tried.endswith("changes no other result")


@SLOW
def test_a_mask_that_was_not_replaced_was_not_tried():
    """The call is attnspan's, and the doctor replaces torch's function."""
    found = first(missed.model_of(lambda q, k, v: patients.attnspan_attention(q, k, v)), "causality-lost")
    assert found.tried == ""


@SLOW
def test_layers_that_mix_tokens_have_their_own_remedy():
    assert "token shift, stop at document borders" in first(patients.sick_shift, "leak").remedy


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))

    def __call__(self, q, k, v):
        bias = self.bias[None]
        return remedied.SDPA(q, k, v, attn_mask=bias)


@SLOW
def test_a_bias_that_is_trained_stays():
    found = first(lambda: (Model(Learned()), tokens()), "dense-mask")
    assert found.remedy.startswith("Keep the mask")
    assert "requires a gradient" in found.tried


# Random numbers


class Encoder(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x)


@SLOW
def test_dropout_of_multihead_attention_is_its_cause():
    found = first(lambda: (Model(fused, block=Encoder), tokens()), "unfused")
    assert found.cause.startswith("torch's fused kernels refuse dropout on cpu with torch 2")
    assert found.tried.startswith("with need_weights=False and dropout=0.0, aten._scaled_dot_product_flash")


class Samples(Block):
    def forward(self, x):
        return super().forward(torch.bernoulli(x.sigmoid()) + x)


@SLOW
def test_a_sample_is_no_dropout():
    assert [x for x in examined(missed.model_of(fused, block=Samples)) if x.kind == "dropout-in-eval"] == []


@SLOW
def test_an_unknown_module_is_told_from_a_fixed_probability():
    listed, always = (remedied.REMEDIED[f"dropout-in-eval: {x}"][2] for x in ("in a list", "always"))
    assert "in training mode after model.eval()" in first(listed, "dropout-in-eval").cause
    found = first(always, "dropout-in-eval")
    assert "does not depend on self.training" in found.cause
    assert found.evidence[1].endswith("(absolute)")


def test_positions_are_a_question_if_the_model_predicts_no_next_token():
    model, batches, _ = remedied.REMEDIED["positions: not given"][2]()
    found = first(lambda: (model, batches, {}), "positions")
    assert found.severity == "note"
    assert found.evidence[-1].endswith("positions may continue, and this is right")


@SLOW
def test_positions_are_tried():
    texts = {x: first(remedied.REMEDIED[f"positions: {x}"][2], "positions") for x in ("not given", "length")}
    assert texts["not given"].tried.endswith("it has the same results as alone")
    assert texts["length"].cause.startswith("The results depend on the length of the row")
    assert texts["length"].tried == "at the front of the row, the document has the same results"


# The compiler


def reads(q, k, v, sizes):
    return fused(q, k, v) * (1.0 / sizes.max().item())


@SLOW
def test_a_setting_that_torch_offers_is_tried():
    sizes = {"sizes": torch.tensor([20, LENGTH])}
    found = first(lambda: (Model(reads), tokens(**sizes), patients.CAUSAL), "graph-break", "compiled")
    assert "capture_scalar_outputs = True" in found.remedy
    assert "earlier graph break" not in found.remedy
    setting = "torch._dynamo.config.capture_scalar_outputs = True"
    assert found.tried == f"with {setting}: no graph break here in the first batch"
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert examined(lambda: (Model(reads), tokens(**sizes), patients.CAUSAL), "compiled") == ()
    found = first(patients.sick_item, "graph-break", "compiled")
    assert found.remedy == "Move this line out of the compiled region"
    assert f"with {setting}: " in found.tried
    assert "graph breaks in the first batch" in found.tried


@SLOW
def test_an_operator_without_a_fake_kernel_is_told_to_register_one():
    found = first(patients.sick_no_fake, "graph-break", "compiled")
    assert found.remedy.startswith("Register a fake kernel")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("expected size 4==4, stride 8==192 at dim=1", "strides"),
        ("expected size 8192==512, stride 64==64 at dim=0", "shapes"),
    ],
)
def test_shapes_are_told_from_strides(text, what):
    found = compile_error(AssertionError(text))
    assert found.cause == f"An operator's fake kernel and its real kernel return different {what}"


def test_hints_are_sentences():
    log = CompilerLog()
    log._break(
        "Graph Break Reason: Kind\n  Explanation: Why.\n  Hint: Do this\n  Hint: Or that.\n"
        "  Hint: Resolving the earlier graph break may resolve this one.\n"
    )
    assert log.breaks[0].remedy == "Do this. Or that."


@pytest.mark.parametrize(
    ("cell", "what", "cause"),
    [
        (Cell(compile="block"), "The step fails with compile block alone", "without the others"),
        (Cell(), "The eager step fails without any feature: it raises", "from step to step"),
        (Cell("block", "full"), "with no smaller combination", ""),
    ],
)
def test_a_feature_that_fails_alone_is_no_combination(cell, what, cause):
    texts = matrix.explained(cell, "it raises")
    assert what in texts[0]
    assert texts[1].endswith(cause)
    assert ("Leave one" in Finding("combination", *texts[:1], (), (), *texts[1:]).remedy) == (not cause)


@SLOW
def test_sizes_that_change_are_marked(monkeypatch):
    batches = [tokens((length,), batch)[0] for batch, length in ((2, 24), (2, 30), (3, 30))]
    found = first(lambda: (Model(fused), batches, patients.CAUSAL), "recompile", "compiled")
    assert found.cause == "The compiled code requires size 2 of input_ids in dim 0, and a call had 3"
    assert found.remedy.startswith("Mark the dimension with torch._dynamo.mark_dynamic(x, dim)")
    assert found.tried == "with all sizes dynamic: 0 recompilations instead of 2"

    def marked(self, model, batch):
        x = batch["input_ids"].clone()
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        return model(input_ids=x)

    subject = Subject(Model(fused), batches)
    wanted = [subject.step(subject.model, x)["0"] for x in batches]
    monkeypatch.setattr(Subject, "call", marked)
    log, error, _ = run_compiled(subject, "aot_eager")
    assert (log.recompiles, error) == ([], None)
    compiled_model = torch.compile(subject.model, backend="aot_eager")
    for x, exact in zip(batches, wanted, strict=True):
        torch.testing.assert_close(subject.step(compiled_model, x)["0"], exact)


# Known issues


def test_known_issues_exist_and_say_when():
    issues = json.loads((Path(run.__file__).parent / "known.json").read_text())
    assert all(x["issue"].startswith("https://github.com/") for x in issues)
    # FlexAttention has no gradients on CPU, and transformers 5.23 makes no mask without padding.
    assert not {"parity", "dense-mask"} & {x["kind"] for x in issues}


@pytest.mark.parametrize(
    ("line", "known"), [("flash_attn(q, q.max().item())", 0), ("flash.PyCapsule.fwd", 1)]
)
def test_a_line_of_flash_attention_may_break_for_another_reason(line, known):
    (found,) = run._with_known_issues([Finding("graph-break", f"The graph breaks here: {line}")])
    assert len(found.known) == known


# Processes


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        (-9, "Linux does so if memory runs out", "Use fewer layers"),
        (-11, "Native code crashed", "in a debugger"),
        (3, "The code ended its process", "Remove the call that ends the process"),
    ],
)
def test_why_a_process_ended(code, cause, remedy):
    found = process._crash("", code, "running", ())
    assert cause in found.cause
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "needs a GPU"),
        (KeyError("use_cuda"), "The factory raises"),
        (RuntimeError("CUDA out of memory"), "The factory raises"),
        (RuntimeError("Attempting to deserialize object on a CUDA device but"), "holds tensors of a GPU"),
    ],
)
def test_an_error_that_names_cuda_may_have_another_cause(error, cause):
    found = child._unloadable(error, "a:b")
    assert cause in found.cause
    assert ("map_location" in found.remedy) == ("holds" in cause)


def test_a_class_of_a_library_is_no_script():
    found = child._unloadable(ModuleNotFoundError("No module named 'transformers'"), "LlamaModel")
    assert "python LlamaModel" not in found.remedy
    assert "Install transformers" in found.remedy


# Ranks


def test_a_rank_that_ends_does_not_wait():
    found = ranks._unfinished([True, False], [None, -11])
    assert (found.kind, found.evidence) == ("crash", ("rank 1: signal SIGSEGV", "rank 0: still running"))
    found = ranks._unfinished([False, False], [None, None])
    assert (found.kind, found.severity) == ("hang", "stops")


def test_parts_of_different_sizes_are_told_from_different_programs():
    def told(n, placements=()):
        return ranks._Told([ranks._Call(Place("a.py", 1), [(2, 4, n, 8)], list(placements))])

    (found,) = ranks._unlike([told(5), told(4)])
    assert "parts of different sizes" in found.cause
    (found,) = ranks._unlike([told(4, ["(Shard(dim=1),)", "(Replicate(),)"])] * 2)
    assert (found.kind, found.severity) == ("rank-placement", "slow")


# Benchmarks


def compiled(function):
    return torch.compile(function, backend="aot_eager")


@SLOW
def test_work_whose_results_are_kept_elsewhere_is_not_deleted():
    model, x, kept = nn.Linear(4, 4), torch.randn(2, 4), []
    model.register_buffer("last", torch.zeros(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def backward():
        model.zero_grad()
        model(x).sum().backward()

    def step():
        backward()
        optimizer.step()

    def buffer():
        model.last.copy_(model(x).detach())

    def appends():
        kept.append(model(x))

    def nothing():
        model(x)

    deleted = [unused._of_torch(compiled(f), [], {}) for f in (backward, step, buffer, appends, nothing)]
    assert deleted == [0.0, 0.0, 0.0, 0.0, 1.0]
