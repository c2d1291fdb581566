"""Mistakes with transformers of diffusers on several ranks raise on every rank, and say what to do."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("diffusers")
sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from diffusers_models import IMPORTED, make
from worlds import preload, raising, ranks

from attnspan.integrations._diffusers_plans import known_plans
from attnspan.integrations.diffusers import Rows, disable, parallelize, unparallelize

preload("attnspan.integrations.diffusers", *IMPORTED)


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def on_ranks(change, name="Flux"):
    """Call a model on both ranks after a change of it and of its inputs."""
    model, inputs = make(name)
    parallelize(model, mesh())
    change(model, inputs)
    model(**inputs)


def plan_of(**changes):
    plan = replace(known_plans["FluxTransformer2DModel"], **changes)
    parallelize(make("Flux")[0], mesh(), plan=plan)


def parallel(change=lambda _: None, **options):
    """A model on both ranks after a change of it."""
    model = make("Flux")[0]
    change(model)
    return parallelize(model, mesh(), **options)


def drop_tokens_of_rank_1(_, inputs):
    if dist.get_rank() == 1:
        inputs["hidden_states"] = inputs["hidden_states"][:, 1:]
        inputs["img_ids"] = inputs["img_ids"][1:]


def keep_one_text_token(_, inputs):
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :1]
    inputs["txt_ids"] = inputs["txt_ids"][:1]


def exchange_processors(model, _):
    model.set_attn_processor(type(model.transformer_blocks[0].attn.processor).__mro__[1]())


def attends(causal, mask=None):
    """Attention of a model's block after a call of the model."""
    model, inputs = make("Flux")
    parallelize(model, mesh())
    sequence = model.transformer_blocks[0].attn.processor._parallel_config
    model(**inputs)
    q = torch.randn(2, 17 - 2 * dist.get_rank(), 2, 8)
    sequence.attend(q, q, q, mask, is_causal=causal)


def given(name="Flux", **inputs):
    return on_ranks(lambda _, own: own.update(inputs), name)


IMAGE, CONTROL, PAIRS = Rows("image"), [torch.zeros(2, 14, 48)], torch.ones(1, 1, 31, 31)
#: What is said of an option -> what makes it.
OPTIONS = {
    "TokenPlan: result: expected a module among .*, got 'head'": lambda: plan_of(result=("head", IMAGE)),
    "TokenPlan: layers: expected lists of layers among .*, got 'layers'": lambda: plan_of(layers=("layers",)),
    r"TokenPlan: every: expected names among .*, got \['rotary'\]": lambda: plan_of(every={"rotary": IMAGE}),
    r"TokenPlan: attention: expected names of modules .*, got \['attn9'\]": lambda: plan_of(
        attention={"attn9": ("image",)}
    ),
    r"TokenPlan: streams: expected streams in rows, .*, got \['sound'\]": lambda: plan_of(
        stream={"hidden_states": Rows("sound")}
    ),
    r"skip_layers on several ranks: expected no layer 0, got \[0\]": lambda: given("SD3", skip_layers=[0]),
    "processor of attn: .*, got FluxAttnProcessor": lambda: on_ranks(exchange_processors),
    "processor of attn: .*, got JointAttnProcessor2_0": lambda: on_ranks(lambda x, _: disable(x), "SD3"),
    "attention on several ranks: expected is_causal=False, got True": lambda: attends(True),
    "transformer: expected a model with a known plan.*, got Linear. Pass": lambda: parallelize(
        nn.Linear(2, 2), mesh()
    ),
    "strategy: expected .*2 ranks, got 'hybrid": lambda: parallel(strategy="hybrid(2, 3)"),
    "batch: expected a mesh dimension among .'cp',., got 'cfg'": lambda: parallel(batch="cfg"),
    "transformer: expected a model on one rank, got a parallel": lambda: parallelize(parallel(), mesh()),
    "transformer: expected a model that is not compiled": lambda: parallel(nn.Module.compile),
    "expected a parallel model, got a model on one rank": lambda: unparallelize(unparallelize(parallel())),
    "expected the original of a parallel model, got a copy": lambda: unparallelize(copy.deepcopy(parallel())),
}
OTHERS = {
    r"ShapeError: attn_mask: expected .*, got \(1, 1, 31, 31\)": lambda: attends(False, PAIRS),
    "PlanMismatchError: .*expected the same shape .*, got a different one on rank 1": lambda: on_ranks(
        drop_tokens_of_rank_1
    ),
    "ShapeError: text tokens: expected at least 2, one for each rank, got 1": lambda: on_ranks(
        keep_one_text_token
    ),
    r"ShapeError: controlnet_block_samples: expected 25 tokens .* 1, got \(2, 14, 48\)": lambda: given(
        controlnet_block_samples=CONTROL
    ),
}
MISTAKES = {f"OptionError: (transformer: )?{text}": make for text, make in OPTIONS.items()} | OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("text", MISTAKES)
@ranks(2)
def test_a_mistake_raises_on_every_rank(text):
    with raising(text):
        MISTAKES[text]()
