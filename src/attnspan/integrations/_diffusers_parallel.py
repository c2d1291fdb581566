"""A diffusers transformer on several ranks: tokens and the batch are cut, and attention joins them.

Before the first layer, each rank keeps its tokens of each stream. After the last layer, all tokens are
gathered. In between, an attention processor has a `Sequence` as its ``_parallel_config``. It attends to the
tokens of all ranks by a plan of `attnspan.parallel`. docs/diffusers-parallel.md describes it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import OptionError, expect
from attnspan.masks import full
from attnspan.parallel import Layout, Strategy
from attnspan.parallel.torch.comm import Ranks
from attnspan.parallel.torch.groups import group_of
from attnspan.parallel.torch.loss import sum_gradients
from attnspan.torch import compat

from ._diffusers_enable import enable
from ._diffusers_hooks import LayerHooks, Parallel, Sequence, streams_of
from ._diffusers_plans import Rows as Rows
from ._diffusers_plans import TokenPlan as TokenPlan
from ._diffusers_plans import known_plans
from ._diffusers_rows import Part

_HERE = "_attnspan_parallel"


def parallelize(
    transformer: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: str | Strategy = "auto",
    batch: str | None = None,
    plan: TokenPlan | None = None,
) -> nn.Module:
    """Run a diffusers transformer on several ranks. Each rank has a part of the tokens or of the batch.

    Every rank calls the transformer with the same inputs and gets the same whole output, so you do not change
    pipelines and training loops. Output and gradients equal one rank's up to rounding, for any number of
    tokens and heads. Compile the transformer after this call.

    Gradients of parameters: each rank computes a part, scaled so that the *mean* over the ranks is the
    gradient. DDP and FSDP2 over the same ranks compute this mean. Without them, call `average_gradients`.
    Gradients of the model's inputs are whole on every rank.

    Args:
        transformer: The model. Its attention becomes attnspan's, as with `enable`.
        mesh: The ranks. All dimensions except ``batch`` share the tokens: one dimension, or two (nodes, ranks
            of a node), which must have names.
        strategy: How ranks attend: "exchange", "ring", "ulysses", "hybrid(u, r)", "hybrid(u, r, ring)", or
            "auto". "auto" chooses the strategy that sends the least (docs/parallel.md).
        batch: Name of the mesh dimension that splits the batch, for example into guided and unguided samples.
        plan: The place of the model's tokens. Default: the known plan of its class (CogVideoX, Flux, Flux 2,
            HunyuanVideo, LTX-Video, Lumina 2, Mochi, PixArt, QwenImage, Stable Diffusion 3 and Wan).

    Returns:
        The transformer.

    Raises:
        OptionError: No plan is known, the mesh or the strategy does not fit, or the model is compiled or
            parallel already.

    Example:
        >>> import torch.distributed as dist
        >>> from diffusers import FluxTransformer2DModel
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        >>> heads = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        >>> widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
        >>> model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, **heads, **widths)
        >>> model = parallelize(model, init_device_mesh("cpu", (2,)), strategy="ulysses")
        >>> _ = unparallelize(model)
        >>> dist.destroy_process_group()
    """
    _check_fresh(transformer)
    if plan is None:
        plan = _plan_of(transformer)
    else:
        _check_plan(transformer, plan)
    tokens, rows, group, chosen = _parts(transformer, plan, mesh, strategy, batch)
    names = list(inspect.signature(transformer.forward).parameters)
    parallel = Parallel(transformer, plan, group.group_name, tokens, rows, chosen, names)
    parallel.patches.apply(lambda: _hook(parallel))
    setattr(transformer, _HERE, parallel)
    return transformer


def _plan_of(transformer: nn.Module) -> TokenPlan:
    for each in type(transformer).__mro__:
        if each.__name__ in known_plans:
            return known_plans[each.__name__]
    raise OptionError(
        "transformer",
        expected="a model with a known plan: " + ", ".join(known_plans),
        got=type(transformer).__name__,
        remedy="Pass plan=TokenPlan(...)",
    )


def _check_plan(transformer: nn.Module, plan: TokenPlan) -> None:
    """Check that a user's plan refers to existing parts of the model."""
    remedy = "Fix the TokenPlan"
    lists = dict(transformer.named_children())
    for name in plan.layers:
        fits = isinstance(lists.get(name), nn.ModuleList)
        expect(fits, "TokenPlan: layers", f"lists of layers among {list(lists)}", repr(name), remedy)
    layers = _layers(transformer, plan)
    taken = [set(inspect.signature(layer.forward).parameters) for layer in layers]
    expect(bool(layers), "TokenPlan: layers", "at least one layer", "none", remedy)
    own, any_of = set(inspect.signature(transformer.forward).parameters), set().union(*taken)
    places = (
        ("stream", plan.stream, taken[0]),
        ("every", plan.every, any_of),
        ("leading", plan.leading, any_of),
        ("inputs", plan.inputs, own),
        ("without_batch", plan.without_batch, own),
        ("refused", plan.refused, own),
    )
    for what, names, known in places:
        wrong = sorted(set(names) - known)
        expect(not wrong, f"TokenPlan: {what}", f"names among {sorted(known)}", wrong, remedy)
    behind = plan.result[0]
    fits = not isinstance(behind, str) or behind in lists
    expect(fits, "TokenPlan: result", f"a module among {list(lists)}", repr(behind), remedy)
    ends = {name.rpartition(".")[2] for name, *_ in _attention(transformer, plan)}
    wrong = sorted(set(plan.attention) - ends)
    expect(not wrong, "TokenPlan: attention", "names of modules with a processor", wrong, remedy)
    rows = [*plan.stream.values(), *plan.inputs.values(), plan.result[1]]
    rows += [x for each in plan.every.values() for x in (each if isinstance(each, tuple) else (each,))]
    used = {x for each in rows for x in each.streams} | {x for each in plan.attention.values() for x in each}
    wrong = sorted((used | set(plan.leading.values())) - set(plan.rows))
    expect(not wrong, "TokenPlan: streams", f"streams in rows, {sorted(plan.rows)}", wrong, remedy)


def _check_fresh(transformer: nn.Module) -> None:
    compiled = compat.original(transformer) is not transformer
    compiled = compiled or any(compat.is_compiled(x) for x in transformer.modules())
    remedy = "Call parallelize first, then compile"
    expect(not compiled, "transformer", "a model that is not compiled", "a compiled model", remedy)
    remedy = "Call unparallelize(transformer) first"
    expect(not hasattr(transformer, _HERE), "transformer", "a model on one rank", "a parallel model", remedy)


def _parts(
    transformer: nn.Module, plan: TokenPlan, mesh: DeviceMesh, strategy: str | Strategy, batch: str | None
) -> tuple[Part | None, Part | None, Any, Strategy | None]:
    """Return the ranks that share tokens, those that share the batch, the group, and the strategy."""
    if batch is None:
        group = group_of(mesh)
        return Part(group), None, group, _strategy(transformer, plan, mesh, strategy)
    names = mesh.mesh_dim_names or ()
    remedy = "Make the mesh with mesh_dim_names=..., and pass one of these names"
    expect(batch in names, "batch", f"a mesh dimension among {names}", repr(batch), remedy)
    group = mesh.get_group() if mesh.ndim == 1 else compat.flattened(mesh).get_group()
    rows, others = Part(mesh[batch].get_group()), tuple(name for name in names if name != batch)
    if not others:
        return None, rows, group, None
    rest = mesh[others]
    return Part(group_of(rest)), rows, group, _strategy(transformer, plan, rest, strategy)


def _strategy(
    transformer: nn.Module, plan: TokenPlan, mesh: DeviceMesh, strategy: str | Strategy
) -> Strategy:
    ranks = group_of(mesh).size()
    if strategy == "auto":
        heads = next(module.heads for _, module, _ in _attention(transformer, plan))
        # With full attention, traffic grows with the number of tokens equally for all strategies.
        each = mesh.size(1) if mesh.ndim == 2 else None
        layout = Layout.contiguous(256 * ranks, ranks)
        chosen = layout.plan(full(), heads=(heads, heads), node_size=each).strategy
    else:
        chosen = Strategy.parse(strategy, ranks)
    Ranks.of(mesh, chosen.members)
    return chosen


def _layers(transformer: nn.Module, plan: TokenPlan) -> list[nn.Module]:
    return [layer for name in plan.layers for layer in transformer.get_submodule(name)]  # type: ignore[attr-defined]


def _attention(transformer: nn.Module, plan: TokenPlan) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the attention modules in the plan, with their streams."""
    for layer in _layers(transformer, plan):
        for name, module in layer.named_modules():
            if streams := streams_of(plan, name, module):
                yield name, module, streams


def _hook(parallel: Parallel) -> None:
    model, later = parallel.model, parallel.patches.later
    later(model.register_forward_pre_hook(parallel.enter, with_kwargs=True).remove)
    if parallel.batch is not None:
        later(model.register_forward_hook(parallel.leave).remove)
    if parallel.tokens is None:
        return
    layers, behind = _layers(model, parallel.plan), parallel.plan.result[0]
    for at, layer in enumerate(layers):
        hooks = LayerHooks(parallel, layer)
        if at == 0:
            later(layer.register_forward_pre_hook(hooks.begin, with_kwargs=True).remove)
        later(layer.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
    if isinstance(behind, str):
        later(model.get_submodule(behind).register_forward_pre_hook(hooks.meet).remove)
    else:
        later(layers[-1].register_forward_hook(hooks.after).remove)
    _set_attention(parallel)


def _set_attention(parallel: Parallel) -> None:
    enable(parallel.model)
    known: dict[tuple[str, ...], Sequence] = {}
    for _, module, streams in list(_attention(parallel.model, parallel.plan)):
        before = module.processor
        sequence, make = known.setdefault(streams, Sequence(parallel, streams)), parallel.plan.processor
        # Each module gets its own processor, because modules that attend among other tokens may share it.
        module.processor = copy.copy(before) if make is None else make(sequence)
        module.processor._parallel_config = sequence
        parallel.patches.later(partial(setattr, module, "processor", before))


def _parallel_of(transformer: nn.Module) -> Parallel:
    parallel = getattr(transformer, _HERE, None)
    remedy = "Pass the argument of parallelize"
    expect(parallel is not None, "transformer", "a parallel model", "a model on one rank", remedy)
    return parallel  # type: ignore[return-value]


def unparallelize(transformer: nn.Module) -> nn.Module:
    """Undo `parallelize`, so that the transformer runs on one rank again.

    Its attention stays attnspan's. To undo this as well, call `disable`.

    Args:
        transformer: The argument of `parallelize`.

    Returns:
        The transformer.

    Raises:
        OptionError: The transformer is not parallel, or it is a copy of a parallel model.

    Example, on each rank of a mesh::

        parallelize(pipe.transformer, mesh)
        images = pipe(prompt).images
        unparallelize(pipe.transformer)
    """
    parallel = _parallel_of(transformer)
    remedy = "Pass the original model, or copy it before parallelize"
    expect(parallel.model is transformer, "transformer", "the original of a parallel model", "a copy", remedy)
    parallel.patches.undo()
    delattr(transformer, _HERE)
    return transformer


@contextmanager
def parallelized(transformer: nn.Module, mesh: DeviceMesh, **options: Any) -> Iterator[nn.Module]:
    """Run `parallelize` as a context manager, and undo it at the end.

    Args:
        transformer: As for `parallelize`.
        mesh: As for `parallelize`.
        **options: As for `parallelize`.

    Raises:
        OptionError: As for `parallelize`.

    Example, on each rank of a mesh::

        with parallelized(pipe.transformer, mesh):
            images = pipe(prompt).images
    """
    parallelize(transformer, mesh, **options)
    try:
        yield transformer
    finally:
        unparallelize(transformer)


def average_gradients(transformer: nn.Module) -> None:
    """Average the gradients of the parameters over the ranks, in place.

    Call it after backward if you use neither DDP nor FSDP2.

    Args:
        transformer: The argument of `parallelize`.

    Raises:
        OptionError: The transformer is not parallel, or a parameter is a DTensor, whose gradient FSDP2
            averages.

    Example, one training step on each rank of a mesh::

        loss = F.mse_loss(transformer(latents, **conditions).sample, target)
        loss.backward()
        average_gradients(transformer)
        optimizer.step()
    """
    group = compat.resolve_process_group(_parallel_of(transformer).whole)
    sum_gradients(transformer.parameters(), group)
    for parameter in transformer.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad /= group.size()
