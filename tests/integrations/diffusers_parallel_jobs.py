"""Transformers of diffusers on several ranks, and the same on one rank in diffusers' own attention."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers_parallel_models import ODD, Sizes, make, noise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import attnspan
from attnspan.errors import UsageError
from attnspan.integrations import _diffusers_hooks as hooks
from attnspan.integrations._diffusers_plans import known_plans
from attnspan.integrations.diffusers import (
    Rows,
    TokenPlan,
    average_gradients,
    disable,
    parallelize,
    parallelized,
    unparallelize,
)
from attnspan.kernels import cpu
from attnspan.parallel.torch.comm import counted_bytes


def step(model: nn.Module, inputs: dict[str, Any], call: Callable[..., Any] | None = None) -> list[Tensor]:
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


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))


def apart(model: nn.Module, alone: nn.Module) -> float:
    """The largest distance of a parameter's gradient from that of one rank."""
    ours, theirs = gradients(model), gradients(alone)
    whole = torch.stack([x.norm() for x in theirs.values()]).norm()
    # Some gradients are zero but for rounding, such as that of a bias in front of a norm of the keys.
    return max(float((ours[n] - x).norm() / max(x.norm(), 1e-3 * whole)) for n, x in theirs.items())


class Mesh(NamedTuple):
    """A mesh over all ranks of a world: sizes and names of its dimensions, and which one has batch rows."""

    shape: tuple[int, ...]
    names: tuple[str, ...] = ("cp",)
    batch: str | None = None

    def make(self) -> Any:
        return init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)


def same_as_one_rank(
    name: str,
    mesh: Mesh,
    strategy: str = "auto",
    sizes: Sizes = ODD,
    compiled: bool | str = False,
    checkpointed: bool = False,
) -> dict[str, float]:
    """Distances from one rank: output, gradients of inputs, of parameters; calls over ranks, bytes sent."""
    alone, inputs = make(name, sizes)
    model = copy.deepcopy(alone)
    wanted = step(alone, inputs)
    parallelize(model, mesh.make(), strategy=strategy, batch=mesh.batch)
    if checkpointed:
        model.enable_gradient_checkpointing()
    call = None
    if compiled:
        torch._dynamo.reset()
        options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}
        if compiled == "layers":
            model.compile_repeated_blocks(**options)
        else:
            call = torch.compile(model, **options)
    # A checkpoint that is compiled must not count.
    counting = contextlib.nullcontext(Counted()) if compiled and checkpointed else Counted()
    with counting as counted, counted_bytes() as counts:
        got = step(model, inputs, call)
    average_gradients(model)
    torch._dynamo.reset()
    found = {"out": distance(got[0], wanted[0]), "parameters": apart(model, alone), "calls": counted.calls}
    found["bytes"] = sum(counts.sent.values())
    return found | {"inputs": max(map(distance, got[1:], wanted[1:]))}


class Counted:
    """Counts calls of the operator over ranks."""

    calls = 0

    def __enter__(self) -> "Counted":
        self.calls, self._own = 0, hooks.attend_rows

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._own(*args, **kwargs)

        hooks.attend_rows = counting
        return self

    def __exit__(self, *_: Any) -> None:
        hooks.attend_rows = self._own


def in_a_block(name: str) -> dict[str, float]:
    """Calls of the CPU kernel within a block of another backend, and the distances from one rank."""
    before = sum(x["calls"] for x in cpu.counters().values())
    with attnspan.backend("math"):
        found = same_as_one_rank(name, Mesh((dist.get_world_size(),)))
    return found | {"kernel": sum(x["calls"] for x in cpu.counters().values()) - before}


def rounding(name: str, sizes: Sizes) -> list[float]:
    """How far output and gradients in bfloat16 are from float32, on this world's ranks over on one."""
    whole, inputs = make(name, sizes)
    logging.disable()  # diffusers warns of `to`.
    alone = copy.deepcopy(whole).to(torch.bfloat16)
    model = copy.deepcopy(alone)
    wanted = step(whole, inputs)
    narrow = {
        key: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in inputs.items()
    }
    errors = []
    parallelize(model, Mesh((dist.get_world_size(),)).make(), strategy="ring")
    for each in (model, alone):
        found = step(each, narrow)
        if each is model:
            average_gradients(model)
        found += [torch.cat([x.flatten().float() for x in gradients(each).values()])]
        right = [*wanted, torch.cat([x.flatten() for x in gradients(whole).values()])]
        errors.append([distance(got.float(), x) for got, x in zip(found, right, strict=True)])
    logging.disable(logging.NOTSET)
    return [ours / theirs for ours, theirs in zip(*errors, strict=True)]


def under(wrapper: str, name: str, strategy: str) -> float:
    """Gradients under DDP or FSDP2 over the same ranks, whose mean is all there is to do."""
    from torch.distributed.fsdp import fully_shard

    alone, inputs = make(name)
    model = copy.deepcopy(alone)
    step(alone, inputs)
    mesh = Mesh((dist.get_world_size(),)).make()
    parallelize(model, mesh, strategy=strategy)
    if wrapper == "ddp":
        step(model, inputs, nn.parallel.DistributedDataParallel(model))
        return apart(model, alone)
    for layer in model.transformer_blocks:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with warnings.catch_warnings():
        # Where a linear layer's result is a view, which nobody writes to here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        step(model, inputs)
    whole = copy.deepcopy(alone)
    for parameter, mine in zip(whole.parameters(), model.parameters(), strict=True):
        parameter.grad = mine.grad.full_tensor()
    return apart(whole, alone)


def pipeline(kind: str, mesh: Mesh) -> list[float]:
    """Three steps of a pipeline, on this world and, after `unparallelize`, alone: how far apart they end."""
    model, _ = make(kind)
    empty = {
        "vae": None,
        "text_encoder": None,
        "tokenizer": None,
        "text_encoder_2": None,
        "tokenizer_2": None,
    }
    call = {"prompt_embeds": noise(1, 7, 12), "pooled_prompt_embeds": noise(1, 8), "num_inference_steps": 3}
    call |= {"height": 48, "width": 80, "output_type": "latent", "return_dict": False}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    if kind == "flux":
        pipe = diffusers.FluxPipeline(scheduler, transformer=model, **empty)
        call |= {"latents": noise(1, 15, 4)}
    else:
        empty |= {"text_encoder_3": None, "tokenizer_3": None}
        pipe = diffusers.StableDiffusion3Pipeline(scheduler=scheduler, transformer=model, **empty)
        call |= {"latents": noise(1, 4, 6, 10), "guidance_scale": 3.0}
        call |= {"negative_prompt_embeds": noise(1, 7, 12), "negative_pooled_prompt_embeds": noise(1, 8)}
    pipe.set_progress_bar_config(disable=True)
    wanted = pipe(**call)[0]
    with parallelized(model, mesh.make(), batch=mesh.batch), Counted() as counted:
        got = pipe(**call)[0]
    again = pipe(**call)[0]
    return [distance(got, wanted), distance(again, wanted), counted.calls]


def message(change: str) -> str:
    """What a mistake raises."""
    model, inputs = make("sd3" if change in ("another backend", "skipped") else "flux")
    ranks = dist.get_world_size()
    mesh = Mesh((ranks,)).make()
    options: dict[str, Any] = {}
    if change == "unknown model":
        model = nn.Linear(2, 2)
    elif change == "strategy":
        options["strategy"] = f"hybrid(2, {ranks + 1})"
    elif change == "batch":
        options["batch"] = "cfg"
    elif change == "twice":
        parallelize(model, mesh)
    elif change == "compiled":
        model.compile()
    elif change.startswith("plan"):
        own = known_plans["FluxTransformer2DModel"]
        changes = {
            "layers": {"layers": ("layers",)},
            "every": {"every": {"rotary": Rows("image")}},
            "result": {"result": ("head", Rows("image"))},
            "attention": {"attention": {"attn9": ("image",)}},
            "streams": {"stream": {"hidden_states": Rows("sound")}},
        }
        options["plan"] = replace(own, **changes[change.removeprefix("plan: ")])
    try:
        if change == "undone twice":
            unparallelize(unparallelize(parallelize(model, mesh)))
        if change == "copy":
            unparallelize(copy.deepcopy(parallelize(model, mesh)))
        parallelize(model, mesh, **options)
        if change == "sizes" and dist.get_rank() == 1:
            inputs["hidden_states"] = inputs["hidden_states"][:, 1:]
            inputs["img_ids"] = inputs["img_ids"][1:]
        if change == "skipped":
            inputs["skip_layers"] = [0]
        if change == "few tokens":
            inputs |= {
                "encoder_hidden_states": inputs["encoder_hidden_states"][:, :1],
                "txt_ids": inputs["txt_ids"][:1],
            }
        if change == "controls":
            inputs["controlnet_block_samples"] = [torch.zeros(2, 14, 48)]
        if change == "exchanged processors":
            model.set_attn_processor(type(model.transformer_blocks[0].attn.processor).__mro__[1]())
        if change == "another backend":
            disable(model)
        if change in ("causal", "mask of pairs"):
            sequence = model.transformer_blocks[0].attn.processor._parallel_config
            model(**inputs)
            q = torch.randn(2, 12 - 2 * dist.get_rank(), 2, 8)
            mask = torch.ones(1, 1, 11, 11) if change == "mask of pairs" else None
            sequence.attend(q, q, q, mask, is_causal=mask is None)
        model(**inputs)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


class Layer(nn.Module):
    """A layer of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention(12, heads=3, dim_head=4, processor=AttnProcessor2_0())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.attend(x + position)


class Model(nn.Module):
    """A model of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden_states: Tensor, position: Tensor) -> Tensor:
        for layer in self.body:
            hidden_states = layer(hidden_states, position=position)
        return hidden_states


def own_model() -> float:
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
    with contextlib.suppress(UsageError):
        parallelize(other, Mesh((2,)).make(), plan=plan)
        return torch.inf
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in other.modules())
    with torch.no_grad():
        wanted = model(x, position)
        with parallelized(model, Mesh((2,)).make(), plan=plan), Counted() as counted:
            got = model(x, position)
    assert counted.calls == 2
    return distance(got, wanted)


def two_calls_before_backward() -> float:
    """Seven tokens and eight, of which rank 0 has three of each."""
    model, few = make("ltx", Sizes(height=1, width=7))
    _, more = make("ltx", Sizes(height=1, width=8))
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each.enable_gradient_checkpointing()
    sizes = {"num_frames": 1}
    for inputs in (few, more):
        inputs["hidden_states"] = inputs["hidden_states"][:, : inputs["width"]]
    parallelize(model, Mesh((dist.get_world_size(),)).make())
    for each in (alone, model):
        outs = [each(**(inputs | sizes), return_dict=False)[0] for inputs in (few, more)]
        for out in outs:
            (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    average_gradients(model)
    return apart(model, alone)


def page(code: str) -> str:
    """Run a page; whether its gradient of the latents is that of all tokens."""
    names: dict[str, Any] = {}
    exec(code, names)
    unparallelize(names["transformer"])
    latents = names["inputs"]["hidden_states"]
    got, latents.grad = latents.grad, None
    names["transformer"](**names["inputs"]).sample.square().mean().backward()
    return "whole" if distance(got, latents.grad) < 5e-6 else "a part"
