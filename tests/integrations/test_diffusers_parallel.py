"""Transformers of diffusers on several ranks give the output and the gradients of one rank."""

import contextlib
import copy
import io
import logging
import math
import re
import runpy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from covering import everything
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("diffusers")
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

import diffusers
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers_models import IMPORTED, ODD, SIDE, make
from worlds import error, preload, ranks, torchrun, world

import attnspan
from attnspan.errors import UsageError
from attnspan.integrations import _diffusers_hooks as hooks
from attnspan.integrations.diffusers import (
    Rows,
    TokenPlan,
    average_gradients,
    parallelize,
    parallelized,
    unparallelize,
)
from attnspan.kernels import cpu
from attnspan.parallel import Strategy
from attnspan.parallel.torch.comm import counted_bytes

# Before a process is forked: each rank would load the models anew.
preload("attnspan.integrations.diffusers", *IMPORTED)

#: Models, and how often each attends over ranks.
MODELS = {
    "Flux": 2,
    "Flux2": 2,
    "QwenImage": 2,
    "SD3": 3,
    "Wan": 2,
    "LTXVideo": 2,
    "HunyuanVideo": 2,
    "HunyuanVideo replaced": 2,
    "Lumina2": 2,
    "PixArt": 2,
    "CogVideoX": 2,
    "Mochi": 2,
}
#: Sums over all tokens of products of some hundred roundings, in float32; about 1e-6 was seen.
CLOSE = 5e-6


def step(model, inputs, call=None):
    """The output, the gradients of the latents and the text, and those of all parameters."""
    leaves = {
        name: x.clone().requires_grad_()
        for name, x in inputs.items()
        if name.endswith("hidden_states") and isinstance(x, Tensor)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast")  # Mochi's own.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a .functools.lru_cache")  # In diffusers.
        out = (model if call is None else call)(**(inputs | leaves), return_dict=False)[0]
    target = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * target).sum().backward()
    return [out.detach(), *(x.grad for x in leaves.values())]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, alone):
    """Of each parameter, those of one rank."""
    ours, theirs = gradients(model), gradients(alone)
    whole = torch.stack([x.norm() for x in theirs.values()]).norm()
    # Some gradients are zero but for rounding, such as that of a bias in front of a norm of the keys.
    for name, x in theirs.items():
        assert (ours[name] - x).norm() < CLOSE * max(x.norm(), 1e-3 * whole), name


class Mesh(NamedTuple):
    """A mesh over all ranks of a world: sizes and names of its dimensions, and which one has batch rows."""

    shape: tuple[int, ...]
    names: tuple[str, ...] = ("cp",)
    batch: str | None = None

    def make(self):
        return init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)


@contextlib.contextmanager
def counting():
    """A list that gets an item at each call of the operator over ranks."""
    calls, own = [], hooks.attend_rows

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    with patch.object(hooks, "attend_rows", counted):
        yield calls


def check(name, mesh, strategy="auto", compiled=False, checkpointed=False, *, calls, tokens=True, **made):
    """Output and gradients are those of one rank, with so many calls over ranks, if these share tokens."""
    alone, inputs = make(name, **made)
    model = copy.deepcopy(alone)
    wanted = step(alone, inputs)
    parallelize(model, mesh.make(), strategy=strategy, batch=mesh.batch)
    if checkpointed:
        model.enable_gradient_checkpointing()
    call = None
    if compiled:
        torch._dynamo.reset()
        options = {"fullgraph": True, "backend": "aot_eager"}
        layers = compiled == "layers"
        call = model.compile_repeated_blocks(**options) if layers else torch.compile(model, **options)
    # A checkpoint that is compiled must not count.
    count = contextlib.nullcontext([]) if compiled and checkpointed else counting()
    with count as counted, counted_bytes() as counts:
        got = step(model, inputs, call)
    average_gradients(model)
    torch._dynamo.reset()
    assert (len(counted), sum(counts.sent.values()) > 0) == (calls, tokens)
    for mine, x in zip(got, wanted, strict=True):
        assert error(mine, x) < CLOSE
    assert_same_gradients(model, alone)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@pytest.mark.parametrize("name", MODELS)
@ranks(lambda count: count)
def test_output_and_gradients_are_those_of_one_rank(name, strategy, count, padded):
    check(name, Mesh((count,)), strategy, calls=MODELS[name], padded=padded)


@ranks(2)
def test_a_block_of_another_backend_holds_on_several_ranks():
    def calls():
        return sum(x["calls"] for x in cpu.counters().values())

    before = calls()
    with attnspan.backend("math"):
        check("Flux", Mesh((2,)), calls=2)
    assert calls() == before, "none of the CPU kernel"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["Flux controlled", "SD3 controlled", "QwenImage edited", "CogVideoX in time", "Wan of image"],
)
@ranks(3)
def test_what_models_take_besides(name):
    check(name, Mesh((3,)), "exchange", calls=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("SD3", Mesh((2,), ("cfg",), "cfg"), "auto"),
        ("QwenImage", Mesh((2, 2), ("cfg", "cp"), "cfg"), "ring"),
        ("HunyuanVideo", Mesh((4,)), "hybrid(2, 2, ring)"),
        pytest.param("Flux", Mesh((2, 2), ("nodes", "node")), "hybrid(2, 2)", marks=pytest.mark.long),
        pytest.param("CogVideoX", Mesh((2, 2), ("cp", "cfg"), "cfg"), "ulysses", marks=pytest.mark.long),
        pytest.param("Lumina2", Mesh((2, 2), ("cfg", "cp"), "cfg"), "exchange", marks=pytest.mark.long),
    ],
)
@ranks(lambda mesh: math.prod(mesh.shape))
def test_batch_rows_and_hybrids(name, mesh, strategy):
    tokens = mesh.names != ("cfg",)
    check(name, mesh, strategy, calls=MODELS[name] if tokens else 0, tokens=tokens, padded=True)


#: Lumina 2 itself reads the lengths of captions on the host.
WHOLE = [name for name in MODELS if name not in ("Lumina2", "QwenImage")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["QwenImage", *(pytest.param(x, marks=pytest.mark.long) for x in WHOLE)])
@ranks(2)
def test_compiled_without_a_break(name):
    calls, scale = (MODELS[name], ODD) if everything() else (1, replace(ODD, layers=1))
    check(name, Mesh((2,)), "exchange", True, calls=calls, padded=True, scale=scale)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Flux", "Wan"])
@ranks(3)
def test_layers_compiled_one_by_one(name):
    check(name, Mesh((3,)), "ulysses", "layers", calls=MODELS[name])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@ranks(2)
def test_layers_that_are_checkpointed_attend_twice(compiled):
    check("Wan", Mesh((2,)), "ring", compiled, True, calls=0 if compiled else 4)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "heads", "side"), [(3, 4, SIDE), (6, 6, 3)])
@ranks(3)
def test_even_and_smallest_shares(text, heads, side):
    scale = replace(ODD, text=text, heads=heads)
    check("Flux", Mesh((3,)), "ulysses", calls=2, scale=scale, side=side)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Flux", "LTXVideo"])  # under DDP, under FSDP
@ranks(2)
def test_the_mean_over_ranks_is_the_gradient_under_ddp_and_fsdp(name):
    alone, inputs = make(name)
    model, whole, mesh = copy.deepcopy(alone), copy.deepcopy(alone), Mesh((2,)).make()
    step(alone, inputs)
    parallelize(model, mesh, strategy="ulysses")
    if name == "Flux":
        step(model, inputs, nn.parallel.DistributedDataParallel(model))
        assert_same_gradients(model, alone)
        return
    for module in (*model.transformer_blocks, model):
        fully_shard(module, mesh=mesh)
    with warnings.catch_warnings():
        # Where a linear layer's result is a view, which nobody writes to here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        step(model, inputs)
    for parameter, mine in zip(whole.parameters(), model.parameters(), strict=True):
        parameter.grad = mine.grad.full_tensor()
    assert_same_gradients(whole, alone)


def pipeline_of(kind, model):
    """A pipeline of latents and how to call it for three steps."""
    names = ["vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
    empty: dict[str, Any] = dict.fromkeys(names)
    text, pooled = torch.randn(2, 1, 7, 32), torch.randn(2, 1, 16)
    call = {"prompt_embeds": text[0], "pooled_prompt_embeds": pooled[0], "num_inference_steps": 3}
    call |= {"height": 48, "width": 80, "output_type": "latent", "return_dict": False}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    if kind == "Flux":
        pipe = diffusers.FluxPipeline(scheduler, transformer=model, **empty)
        call |= {"latents": torch.randn(1, 15, 16)}
    else:
        empty |= {"text_encoder_3": None, "tokenizer_3": None}
        pipe = diffusers.StableDiffusion3Pipeline(scheduler=scheduler, transformer=model, **empty)
        call |= {"latents": torch.randn(1, 4, 6, 10), "guidance_scale": 3.0}
        call |= {"negative_prompt_embeds": text[1], "negative_pooled_prompt_embeds": pooled[1]}
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "calls"), [("Flux", Mesh((2,)), 6), ("SD3", Mesh((2,), ("cfg",), "cfg"), 0)]
)
@ranks(2)
def test_three_steps_of_a_pipeline_and_back_to_one_rank(kind, mesh, calls):
    model, _ = make(kind)
    pipe, call = pipeline_of(kind, model)
    wanted = pipe(**call)[0]
    with parallelized(model, mesh.make(), batch=mesh.batch), counting() as counted:
        got = pipe(**call)[0]
    assert error(got, wanted) < CLOSE
    assert error(pipe(**call)[0], wanted) < CLOSE
    assert len(counted) == calls


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("Flux", marks=pytest.mark.long), "HunyuanVideo"])
@ranks(2)
def test_bfloat16_is_as_close_as_on_one_rank(name):
    """How far output and gradients are from float32, over ranks and on one."""
    whole, inputs = make(name, padded=True)
    logging.disable()  # diffusers warns of `to`.
    alone = copy.deepcopy(whole).to(torch.bfloat16)
    model = copy.deepcopy(alone)
    wanted = step(whole, inputs)
    floating = {key for key, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    narrow = inputs | {key: inputs[key].bfloat16() for key in floating}
    errors = []
    parallelize(model, Mesh((2,)).make(), strategy="ring")
    for each in (model, alone):
        found = step(each, narrow)
        if each is model:
            average_gradients(model)
        found += [torch.cat([x.flatten().float() for x in gradients(each).values()])]
        right = [*wanted, torch.cat([x.flatten() for x in gradients(whole).values()])]
        errors.append([error(got.float(), x) for got, x in zip(found, right, strict=True)])
    logging.disable(logging.NOTSET)
    assert all(ours < 1.2 * theirs for ours, theirs in zip(*errors, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "members", "groups"), [("exchange", 3, 1), ("exchange", 2, 2), ("ring", 2, 2)]
)
def test_a_plan_is_as_large_as_compilers_are_told(kind, members, groups):
    for streams in ((7,), (64, 61)):
        for rank in range(members * groups):
            strategy = Strategy(kind, members, groups)
            given = torch.zeros(1), strategy.name, strategy.ranks, rank, (4, 2), streams
            torch.library.opcheck(torch.ops.attnspan.plan_of_rows.default, given)


class Layer(nn.Module):
    """A layer of somebody's own."""

    def __init__(self):
        super().__init__()
        self.attend = Attention(12, heads=3, dim_head=4, processor=AttnProcessor2_0())

    def forward(self, x, position):
        return x + self.attend(x + position)


class Model(nn.Module):
    """A model of somebody's own."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden_states, position):
        for layer in self.body:
            hidden_states = layer(hidden_states, position=position)
        return hidden_states


@ranks(2)
def test_a_model_of_ones_own():
    torch.manual_seed(0)
    model, x, position = Model(), torch.randn(2, 11, 12), torch.randn(11, 12)
    plan = TokenPlan(
        layers=("body",),
        rows={"image": lambda _, inputs: inputs["hidden_states"].shape[1]},
        stream={"x": Rows("image")},
        every={"position": Rows("image", dim=0)},
        result=(None, Rows("image")),
        attention={"attend": ("image",)},
    )
    other = copy.deepcopy(model)
    for layer in other.body:
        layer.attend.processor = object()  # It attends in no way that is known.
    with pytest.raises(UsageError):
        parallelize(other, Mesh((2,)).make(), plan=plan)
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in other.modules())
    with torch.no_grad():
        wanted = model(x, position)
        with parallelized(model, Mesh((2,)).make(), plan=plan), counting() as counted:
            got = model(x, position)
    assert len(counted) == 2
    assert error(got, wanted) < CLOSE


@pytest.mark.slow
@ranks(3)
def test_a_checkpoint_recomputes_with_the_sizes_of_its_own_call():
    # Seven tokens and eight, of which rank 0 has three of each.
    model, given = make("LTXVideo")
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each.enable_gradient_checkpointing()
    sizes, whole = {"num_frames": 1, "height": 1, "return_dict": False}, given.pop("hidden_states")
    parallelize(model, Mesh((3,)).make())
    for each in (alone, model):
        outs = [each(whole[:, :n], **given | sizes | {"width": n})[0] for n in (7, 8)]
        for out in outs:
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    average_gradients(model)
    assert_same_gradients(model, alone)


REPOSITORY = Path(__file__).parents[2]


@ranks(2)
def test_the_page_runs_on_two_ranks():
    page = (REPOSITORY / "docs" / "diffusers-parallel.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    unparallelize(names["transformer"])
    latents = names["inputs"]["hidden_states"]
    got, latents.grad = latents.grad, None
    names["transformer"](**names["inputs"]).sample.square().mean().backward()
    assert error(got, latents.grad) < CLOSE, "the gradient of all tokens"


EXAMPLE = REPOSITORY / "examples" / "diffusion_two_ranks.py"


def said():
    """What the example prints on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLE))["main"]()
    return text.getvalue()


@pytest.mark.slow
def test_the_example_is_as_close_as_it_says():
    printed = torchrun(2, EXAMPLE) if everything() else world(2).run(said)[0]
    found = re.findall(r"(?:latents|gradients) differ by (\S+)", printed)
    assert len(found) == 2
    assert max(map(float, found)) < CLOSE
