"""Mistakes with transformers of diffusers on several ranks raise on every rank, and say what to do."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def on_ranks(change: Callable[[Any, dict[str, Any]], None], name: str = "Flux") -> None:
    """Call a model on both ranks after a change of it and of its inputs."""
    model, inputs = make(name)
    parallelize(model, mesh())
    change(model, inputs)
    model(**inputs)


def plan_of(**changes: Any) -> None:
    plan = replace(known_plans["FluxTransformer2DModel"], **changes)
    parallelize(make("Flux")[0], mesh(), plan=plan)


def parallel(change: Callable[[Any], None] = lambda _: None, **options: Any) -> Any:
    """A model on both ranks after a change of it."""
    model = make("Flux")[0]
    change(model)
    return parallelize(model, mesh(), **options)


def attend(mask: Any) -> None:
    """Attention of a model's block after a call of the model."""
    model, inputs = make("Flux")
    parallelize(model, mesh())
    sequence = model.transformer_blocks[0].attn.processor._parallel_config
    model(**inputs)
    q = torch.randn(2, 17 - 2 * dist.get_rank(), 2, 8)
    sequence.attend(q, q, q, mask, is_causal=mask is None)


def drop_tokens_of_rank_1(_: Any, inputs: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        inputs["hidden_states"] = inputs["hidden_states"][:, 1:]
        inputs["img_ids"] = inputs["img_ids"][1:]


def keep_one_text_token(_: Any, inputs: dict[str, Any]) -> None:
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :1]
    inputs["txt_ids"] = inputs["txt_ids"][:1]


def exchange_processors(model: Any, _: dict[str, Any]) -> None:
    model.set_attn_processor(type(model.transformer_blocks[0].attn.processor).__mro__[1]())


#: What is said -> what makes it.
MISTAKES: dict[str, Callable[[], Any]] = {
    "OptionError: TokenPlan: result: expected a module among .*, got 'head'": lambda: plan_of(
        result=("head", Rows("image"))
    ),
    "OptionError: TokenPlan: layers: expected lists of layers among .*, got 'layers'": lambda: plan_of(
        layers=("layers",)
    ),
    r"OptionError: TokenPlan: every: expected names among .*, got \['rotary'\]": lambda: plan_of(
        every={"rotary": Rows("image")}
    ),
    r"OptionError: TokenPlan: attention: expected names of modules .*, got \['attn9'\]": lambda: plan_of(
        attention={"attn9": ("image",)}
    ),
    r"OptionError: TokenPlan: streams: expected streams in rows, .*, got \['sound'\]": lambda: plan_of(
        stream={"hidden_states": Rows("sound")}
    ),
    r"OptionError: skip_layers on several ranks: expected no layer 0, got \[0\]": lambda: on_ranks(
        lambda _, inputs: inputs.update(skip_layers=[0]), "SD3"
    ),
    "OptionError: processor of attn: .*, got FluxAttnProcessor": lambda: on_ranks(exchange_processors),
    "OptionError: processor of attn: .*, got JointAttnProcessor2_0": lambda: on_ranks(
        lambda model, _: disable(model), "SD3"
    ),
    "OptionError: attention on several ranks: expected is_causal=False, got True": lambda: attend(None),
    r"ShapeError: attn_mask: expected .*, got \(1, 1, 31, 31\)": lambda: attend(torch.ones(1, 1, 31, 31)),
    "OptionError: transformer: expected a model with a known plan.*, got Linear. Pass": lambda: parallelize(
        nn.Linear(2, 2), mesh()
    ),
    "OptionError: strategy: expected .*2 ranks, got 'hybrid": lambda: parallel(strategy="hybrid(2, 3)"),
    "OptionError: batch: expected a mesh dimension among .'cp',., got 'cfg'": lambda: parallel(batch="cfg"),
    "OptionError: transformer: expected a model on one rank, got a parallel model": lambda: parallelize(
        parallel(), mesh()
    ),
    "OptionError: transformer: expected a model that is not compiled": lambda: parallel(nn.Module.compile),
    "OptionError: transformer: expected a parallel model, got a model on one rank": lambda: unparallelize(
        unparallelize(parallel())
    ),
    "OptionError: transformer: expected the original of a parallel model, got a copy": lambda: unparallelize(
        copy.deepcopy(parallel())
    ),
    "PlanMismatchError: .*expected the same shape .*, got a different one on rank 1": lambda: on_ranks(
        drop_tokens_of_rank_1
    ),
    "ShapeError: text tokens: expected at least 2, one for each rank, got 1": lambda: on_ranks(
        keep_one_text_token
    ),
    r"ShapeError: controlnet_block_samples: expected 25 tokens .* 1, got \(2, 14, 48\)": lambda: on_ranks(
        lambda _, inputs: inputs.update(controlnet_block_samples=[torch.zeros(2, 14, 48)])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", MISTAKES)
@ranks(2)
def test_a_mistake_raises_on_every_rank(text: str) -> None:
    with raising(text):
        MISTAKES[text]()
