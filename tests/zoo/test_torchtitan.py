"""torchtitan's own trainer with attnspan: the losses of its other attentions, in every mode, on any ranks."""

import doctest
import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from titan_runs import DENSE, OURS, Case, torchtitan_debug

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchtitan_debug.without_triton()
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks
    from torchtitan.models.common import attention as theirs
    from torchtitan.models.llama3 import model_registry

    from attnspan.integrations import torchtitan as ours

from attnspan.errors import OptionError, ShapeError, UsageError
from attnspan.testing import assert_isolated, probe

ROOT = Path(__file__).parents[2]
SHORT = ("--training.steps", "4")
LONG_ROWS = (*SHORT, "--training.seq_len", "512")
CP = ("--parallelism.context_parallel_degree", "2")
PARTIAL = ("--parallelism.spmd_backend", "partial_dtensor")
FULL = ("--parallelism.spmd_backend", "full_dtensor")
FLEX = "gpt_oss_debugmodel_flex"


def balanced(name):
    return ("--parallelism.context_parallel_load_balancer", name)


MODES = [Case(ac=ac, backend=backend) for backend in ("", "aot_eager") for ac in ("", "selective", "full")]
GPT_OSS = Case("gpt_oss", flags=SHORT)
CASES = {
    1: {
        "dense": Case(attention=DENSE),
        **{f"{case.ac or 'none'} {case.backend or 'eager'}": case for case in MODES},
        "sdpa": Case(attention="sdpa", dataset="whole"),
        "whole": Case(dataset="whole"),
        "long rows": Case(flags=LONG_ROWS),
        "gpt_oss dense": Case("gpt_oss", FLEX, attention=DENSE, flags=SHORT),
        "gpt_oss": GPT_OSS,
        "gpt_oss bfloat16": Case("gpt_oss", dtype="bfloat16", flags=SHORT),
        "gpt_oss compiled": Case(
            "gpt_oss", FLEX, OURS, "selective", "aot_eager", "random", "bfloat16", SHORT
        ),
        "deepseek dense": Case("deepseek_v3", attention=DENSE, flags=SHORT),
        "deepseek": Case("deepseek_v3", flags=SHORT),
    },
    2: {
        "headtail": Case(flags=CP),
        "attnspan selective compiled": Case(
            ac="selective", backend="aot_eager", flags=(*CP, *PARTIAL, *balanced("attnspan"))
        ),
        "in order, full compiled": Case(
            ac="full", backend="aot_eager", flags=(*CP, *PARTIAL, *balanced("None"))
        ),
        "full dtensor": Case(flags=(*CP, *FULL)),
        "ptrr": Case(flags=(*LONG_ROWS, *CP, *PARTIAL, *balanced("ptrr"))),
        "gpt_oss": Case("gpt_oss", FLEX, flags=(*SHORT, *CP, *PARTIAL, *balanced("attnspan"))),
        "fsdp": Case(flags=(*SHORT, *PARTIAL)),
    },
    4: {"fsdp and headtail": Case(flags=(*SHORT, *CP, *PARTIAL))},
}


def torchrun(ranks, *command):
    paths = [str(ROOT / "tests/zoo"), str(ROOT / "examples")]
    names = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONWARNINGS")
    environment = {**os.environ, **dict(zip(names, (os.pathsep.join(paths), "1", "ignore"), strict=True))}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


@cache
def runs(ranks, folder):
    """What all runs on so many ranks found, by name."""
    out = folder / f"{ranks}.json"
    torchrun(
        ranks, ROOT / "tests/zoo/titan_runs.py", out, json.dumps([asdict(x) for x in CASES[ranks].values()])
    )
    return dict(zip(CASES[ranks], json.loads(out.read_text()), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    return lambda ranks, name: runs(ranks, folder)[name]


def assert_same(a, b, within, of=("losses", "norms")):
    for name in of:
        torch.testing.assert_close(torch.tensor(a[name]), torch.tensor(b[name]), rtol=within, atol=0)


def assert_ran(run, forwards=1):
    steps = len(run["losses"]) * run["layers"]
    assert run["ran"] == {"forward": forwards * steps, "backward": steps}
    assert run["breaks"] == 0


@pytest.mark.parametrize("case", MODES, ids=lambda case: f"{case.ac or 'none'}-{case.backend or 'eager'}")
def test_llama_learns_as_with_attention_over_all_pairs(found, case):
    """In every mode of checkpointing, compiled by block or not; full checkpointing runs forward twice."""
    dense, run = found(1, "dense"), found(1, f"{case.ac or 'none'} {case.backend or 'eager'}")
    assert len(run["losses"]) == 10
    assert run["losses"][-1] < run["losses"][0] - 0.5
    assert_same(run, dense, 5e-6)
    assert_ran(run, 2 if case.ac == "full" else 1)
    assert run["graphs"] == (2 if case.backend else 0)  # Six blocks share one program; the loss has another.
    assert dense["ran"] == {"forward": 0, "backward": 0}


@pytest.mark.parametrize(
    ("name", "other", "within"),
    [
        ("whole", "sdpa", 1e-5),  # documents as long as rows
        ("gpt_oss", "gpt_oss dense", 1e-5),  # windows and sinks, built for VarlenAttention
        ("gpt_oss compiled", "gpt_oss bfloat16", 1e-5),  # the only dtype in which its experts compile
        # Values have another head dim. Three steps differ by 2e-7; the fourth, on some processors, by 1.4e-5:
        # presumably by choosing an expert.
        ("deepseek", "deepseek dense", 1e-4),
    ],
)
def test_models_learn_as_with_other_attentions(found, name, other, within):
    assert_same(found(1, name), found(1, other), within)
    assert_ran(found(1, name))


@pytest.mark.parametrize(
    ("two", "one", "forwards"),
    [
        ("headtail", "none eager", 1),
        ("attnspan selective compiled", "none eager", 1),
        ("in order, full compiled", "none eager", 2),
        ("ptrr", "long rows", 1),
        ("gpt_oss", "gpt_oss", 1),
    ],
)
def test_two_ranks_of_context_parallelism_learn_as_one(found, two, one, forwards):
    """Packed documents, under each balancer, the two backends of parameters, and with windows and sinks."""
    assert_same(found(2, two), found(1, one), 1e-5, of=("losses",))
    # A norm in float32 over the six million weights of experts is off by 6e-5; two ranks add less each.
    assert_same(found(2, two), found(1, one), 1e-4 if two == "gpt_oss" else 1e-5, of=("norms",))
    assert_ran(found(2, two), forwards)


def test_two_ranks_whose_activations_are_dtensors(found):
    """The trainer reports the losses of this backend twice as large, with any attention."""
    run, one = found(2, "full dtensor"), found(1, "none eager")
    assert_same(run, one, 1e-5, of=("norms",))
    assert_same({"losses": [x / 2 for x in run["losses"]]}, one, 1e-5, of=("losses",))
    assert_ran(run)


def test_fsdp_with_context_parallelism(found):
    assert_same(found(4, "fsdp and headtail"), found(2, "fsdp"), 1e-5)
    assert_ran(found(4, "fsdp and headtail"))


def test_the_command_of_the_page():
    page = (ROOT / "docs/torchtitan.md").read_text()
    command = page.split("torchrun --nproc-per-node 2 ")[1].split("```")[0].replace("\\\n", "").split()
    printed = torchrun(2, *command, *SHORT)
    assert printed.count("attnspan.integrations.torchtitan.attention: model_spec") == 2 * 6
    assert "step:  4" in printed


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]])


def mask_mods(positions):
    window = theirs.get_sliding_window_mask_mod(3)
    packed = theirs.get_efficient_causal_mask_mod_for_packed_document(positions)
    return {
        "causal": theirs.get_causal_mask_mod(),
        "documents": theirs.get_document_mask_mod(positions),
        "packed": and_masks(theirs.get_causal_mask_mod(), packed),
        "window": and_masks(theirs.get_causal_mask_mod(), packed, window),
        "blocks": or_masks(window, theirs.get_fixed_block_mask_mod(4)),
    }


def visible(mask_mod, positions):
    b, q = torch.arange(len(positions))[:, None, None, None], torch.arange(positions.shape[1])
    seen = mask_mod(b, torch.zeros(1, 1, 1, 1, dtype=torch.int64), q[:, None], q)
    return seen.expand(len(positions), 1, -1, -1)


def shown(mask, k_len):
    k = torch.arange(k_len)
    return ((mask.bounds[..., :1] <= k) & (k < mask.bounds[..., 1:])).any(3)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", mask_mods(POSITIONS))
def test_each_mask_of_torchtitan_as_spans(name, rows):
    positions = POSITIONS[:rows]
    mask_mod = mask_mods(positions)[name]
    mask = ours.make_mask(mask_mod, rows, None, 12, 12)
    assert shown(mask, 12).equal(visible(mask_mod, positions))
    assert mask.window == (3 if name == "window" else 0)
    # Rows that start within a document.
    positions = positions[:, 1:]
    mask_mod = mask_mods(positions)[name]
    assert shown(ours.make_mask(mask_mod, rows, None, 11, 11), 11).equal(visible(mask_mod, positions))


def test_a_mask_of_the_user_is_read_pair_by_pair_and_said():
    def odd(b, h, q, k):
        return (k % 2 == 1) | (q == k)

    with pytest.warns(ours.AllPairsWarning, match="odd is not one of torchtitan's own"):
        mask = ours.make_mask(odd, 2, None, 12, 12)
    assert shown(mask, 12).equal(visible(odd, POSITIONS))


def debug_model(inner=None):
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ours.attention(inner or layer.attention.inner_attention)
    model = config.build()
    with torch.no_grad():
        model.init_weights()
    return model


class Packed(torch.nn.Module):
    def __init__(self, model, positions, seen):
        super().__init__()
        self.model, self.positions = model, positions
        self.masks = model.get_attention_masks(positions=seen)

    def forward(self, input_ids):
        return self.model(input_ids, positions=self.positions, attention_masks=self.masks)


def test_packed_documents_do_not_see_each_other():
    model, documents = debug_model(), (POSITIONS == 0).cumsum(1)
    batch = {"input_ids": torch.randint(2000, POSITIONS.shape)}
    assert_isolated(Packed(model, POSITIONS, POSITIONS), batch, documents)
    one = torch.arange(12).expand(2, -1)
    assert not probe(Packed(model, POSITIONS, one), batch, documents).isolated


def test_the_examples_of_docstrings():
    done = doctest.testmod(ours)
    assert not done.failed
    assert done.attempted > 4


def test_layers_of_flex_attention_keep_their_masks():
    model = model_registry("debugmodel").model.build()
    theirs_made = theirs._compiled_create_block_mask
    assert theirs_made.func is ours._compiled_or_spans
    made = theirs_made.func(create_block_mask, theirs.get_causal_mask_mod(), 1, None, 128, 128, "cpu")
    assert isinstance(made, theirs.BlockMask)
    assert type(model.layers["0"].attention.inner_attention) is theirs.FlexAttention


def test_disable_gives_torchtitan_its_own_functions_back():
    """And the override makes the patches again."""
    places = (
        (theirs, "_compiled_create_block_mask"),
        (ours.context_parallel, "cp_shard"),
        (ours.activation_checkpoint, "_get_default_save_ops"),
    )
    own = [getattr(*place).args[0] for place in places]
    ours.disable()
    assert all(getattr(*place) is function for place, function in zip(places, own, strict=True))
    ours.attention(model_registry("debugmodel").model.layers[0].attention.inner_attention)
    assert [getattr(*place).args[0] for place in places] == own


def test_calls_that_do_not_fit_raise():
    with pytest.raises(OptionError, match='attn_backend="flex"'):
        ours.attention(theirs.ScaledDotProductAttention.Config())
    with pytest.raises(OptionError, match=r"\(any, 0\), which is causal, got"):
        ours.attention(theirs.VarlenAttention.Config(window_size=(-1, -1)))
    model = debug_model(theirs.VarlenAttention.Config(window_size=(3, 0)))
    with pytest.raises(UsageError, match="window of 4"):  # The model does not put it into its masks.
        Packed(model, POSITIONS, POSITIONS)(torch.ones_like(POSITIONS))
    layer, q = ours.Attention.Config().build(), torch.randn(2, 12, 4, 16)
    mask = causal_mask()
    with pytest.raises(UsageError, match="expected a SpanMask from Decoder, got NoneType"):
        layer(q, q, q, attention_masks=None)
    with pytest.raises(UsageError, match="score_mod: expected None"):
        layer(q, q, q, attention_masks=mask, score_mod=lambda score, *_: score)
    for heads, keys in ((4, 12), (None, 24)):
        with pytest.raises(UsageError, match="your own override with fqns="):
            ours.make_mask(theirs.get_causal_mask_mod(), 2, heads, 12, keys)


@pytest.mark.parametrize(
    ("kind", "ranks", "length", "message"),
    [
        ("headtail", 5, 12, "expected a multiple of 10, got 12"),
        ("ptrr", 2, 12, "expected a multiple of 256, got 12"),
        (None, 5, 12, "expected a multiple of 5, got 12"),
        ("zigzag", 2, 12, 'expected None, "headtail", "ptrr" or "attnspan", got zigzag'),
        ("ptrr", 2, 256, "ptrr_mask_key: expected a or b, got None"),
        ("headtail", 2, 256, "mask b: expected spans, got NoneType"),
    ],
)
def test_degrees_balancers_and_masks_that_do_not_fit(kind, ranks, length, message):
    mask, mesh = causal_mask(length), SimpleNamespace(size=lambda: ranks)
    masks = {"a": mask, "b": mask if kind == "ptrr" else None} if length == 256 else mask
    with pytest.raises((OptionError, ShapeError, UsageError), match=message):
        ours.context_parallel.cp_shard(mesh, (torch.zeros(2, length),), masks, kind)


def causal_mask(length=12):
    return ours.make_mask(theirs.get_causal_mask_mod(), 2, None, length, length)
