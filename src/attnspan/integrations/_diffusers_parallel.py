"""A diffusers transformer on several ranks: tokens and batch rows are cut, and attention joins them again.

Forward hooks do it. In front of the first layer a rank keeps its rows of each stream of tokens, and behind
the last one all rows are gathered; an attention's processor has a `Sequence` as its ``_parallel_config``,
which attends to the rows of all ranks by a plan of `attnspan.parallel`. docs/diffusers-parallel.md tells it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import OptionError, ShapeError, expect
from ..masks import full
from ..parallel import Layout, Strategy
from ..parallel.torch.comm import Ranks, group_of
from ..parallel.torch.loss import sum_gradients
from ._diffusers_plans import Rows, TokenPlan, known_plans
from ._diffusers_rows import attend_rows, cut, entered, gather, share, watch

__all__ = ["Rows", "Sequence", "TokenPlan", "average_gradients", "parallelize", "parallelized", "unparallelize"]

_HERE = "_attnspan_parallel"


class _Part:
    """This rank's place among ranks that share something, and the name of their group."""

    def __init__(self, ranks: int, rank: int, group: str) -> None:
        self.ranks, self.rank, self.group = ranks, rank, group

    def cut(self, x: Tensor, dim: int, streams: tuple[int, ...]) -> Tensor:
        return cut(x, dim, streams, self.ranks, self.rank)

    def gather(self, x: Tensor, dim: int, streams: tuple[int, ...]) -> Tensor:
        return gather(x, dim, streams, self.ranks, self.rank, self.group)


class _Shared:
    """What a copy of a model shares with it."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(eq=False)
class _Parallel(_Shared):
    """What `parallelize` made of a transformer.

    Attributes:
        model: The transformer.
        plan: Where its tokens are.
        whole: Name of the group of all ranks.
        tokens: The ranks that share tokens, or None.
        batch: The ranks that share batch rows, or None.
        strategy: How the first of them attend.
        names: Names of the model's inputs.
        rows: Tokens of each stream, of the call under way.
        undo: What takes it away again.
        before: `rows` by an argument of a layer, which is the same again where a checkpoint recomputes it.
    """

    model: nn.Module
    plan: TokenPlan
    group: Any
    whole: str
    tokens: _Part | None
    batch: _Part | None
    strategy: Strategy | None
    names: list[str]
    rows: dict[str, Any] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)
    before: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def streams(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Tokens of some streams."""
        return tuple(self.rows[name] for name in names)

    def recall(self, x: Any) -> None:
        """Let `rows` be those of the call that this argument of a layer is from, also within backward."""
        if not torch.compiler.is_compiling() and isinstance(x, Tensor):
            self.rows = self.before.setdefault(x, self.rows)

    # Each hook is a method, as the compiler follows those.

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All inputs by name, of this rank's batch rows, and how many tokens there will be."""
        inputs, self.rows = dict(zip(self.names, args, strict=False)) | kwargs, {}
        for name in self.plan.refused:
            remedy = "Leave it out, or call unparallelize(transformer) first"
            expect(inputs.get(name) is None, f"{name} on several ranks", "None", "something", remedy)
        inputs = self._entered(inputs)
        if self.batch is not None:
            count = inputs["hidden_states"].shape[0]
            remedy = "Pass guided and unguided rows in one batch, or a mesh of fewer ranks for it"
            what, wanted = "hidden_states", "at least {} batch rows, one for each rank of the batch"
            fits = count >= self.batch.ranks
            expect(fits, what, wanted, count, remedy, self.batch.ranks, error=ShapeError)
            self.rows["batch"] = count
            for name, value in inputs.items():
                if name not in self.plan.without_batch or getattr(value, "ndim", 0) == 3:
                    inputs[name] = self._of_batch(value, count)
        if self.tokens is not None:
            for name, count_tokens in self.plan.rows.items():
                self.rows[name] = found = count_tokens(model, inputs)
                what, wanted = f"{name} tokens", "at least {}, one for each rank"
                remedy = "Pad them and mask the padding, or use fewer ranks"
                fits = found >= self.tokens.ranks
                expect(fits, what, wanted, found, remedy, self.tokens.ranks, error=ShapeError)
            for name, where in self.plan.inputs.items():
                if name in inputs:
                    inputs[name] = self._cut(name, inputs[name], where)
            _check_skipped(model, inputs.get("skip_layers"))
        return (), inputs

    def _entered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        sizes = [n for x in tree_leaves(inputs) if isinstance(x, Tensor) for n in (x.ndim, *x.shape)]
        first = inputs["hidden_states"]
        found = {"hidden_states": entered(first, self.whole, sizes)}
        for name, x in inputs.items():
            if name != "hidden_states" and isinstance(x, Tensor) and x.requires_grad:
                found[name] = entered(x, self.whole)
        return inputs | found

    def _of_batch(self, x: Any, count: Any) -> Any:
        assert self.batch is not None
        if isinstance(x, Tensor):
            return self.batch.cut(x, 0, (count,)) if x.ndim and x.shape[0] == count else x
        if isinstance(x, dict):
            return {name: self._of_batch(value, count) for name, value in x.items()}
        if isinstance(x, (list, tuple)) and len(x):
            if all(isinstance(value, Tensor) for value in x):
                return type(x)([self._of_batch(value, count) for value in x])
            if len(x) == count and all(isinstance(value, (list, tuple)) for value in x):
                start = sum(share(count, self.batch.ranks, rank) for rank in range(self.batch.rank))
                return x[start : start + share(count, self.batch.ranks, self.batch.rank)]
        return x

    def _cut(self, name: str, x: Any, rows: Rows | tuple[Rows, ...]) -> Any:
        """A rank's rows of an argument: a tensor, a tuple or list of them, or None."""
        if isinstance(x, (tuple, list)):
            each = rows if isinstance(rows, tuple) else (rows,) * len(x)
            return type(x)([self._cut(name, part, of) for part, of in zip(x, each, strict=True)])
        if not isinstance(x, Tensor):
            return x
        assert isinstance(rows, Rows) and self.tokens is not None
        if rows.ndim is not None and x.ndim != rows.ndim:
            return x
        streams, got = self.streams(rows.streams), x.shape[rows.dim]
        if got == 1:
            return x
        wanted, remedy = "{} tokens along dimension {}", "Pass it for all tokens: each rank takes its own"
        expect(
            got == sum(streams), name, wanted, tuple(x.shape), remedy, sum(streams), rows.dim, error=ShapeError
        )
        return self.tokens.cut(x, rows.dim, streams)

    def leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """The batch rows of all ranks."""
        del model, args
        assert self.batch is not None
        rows = (self.rows["batch"],)
        if isinstance(output, tuple):
            return (self.batch.gather(output[0], 0, rows), *output[1:])
        output.sample = self.batch.gather(output.sample, 0, rows)
        return output


class _Layer(_Shared):
    """The hooks of one layer."""

    def __init__(self, parallel: _Parallel, layer: nn.Module, first: bool) -> None:
        self.parallel, plan = parallel, parallel.plan
        self.names = list(inspect.signature(layer.forward).parameters)
        self.cut = {**plan.every, **plan.stream} if first else dict(plan.every)
        self.attending = [name for name, module in layer.named_modules() if _streams_of(plan, name, module)]

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments, of this rank's rows."""
        parallel = self.parallel
        for name in self.attending:
            module = layer.get_submodule(name)
            fits = isinstance(getattr(module.processor, "_parallel_config", None), Sequence)
            remedy = "Call unparallelize and parallelize again after processors were exchanged"
            what, wanted = f"processor of {name}", "the one of parallelize"
            expect(fits, what, wanted, type(module.processor).__name__, remedy)
        parallel.recall(args[0] if args else kwargs.get(self.names[0]))
        places, named = list(args), dict(kwargs)
        for name, value in [*zip(self.names, args, strict=False), *kwargs.items()]:
            if name in self.cut:
                value = parallel._cut(name, value, self.cut[name])
            elif name in parallel.plan.leading:
                value = self._leading(value, parallel.plan.leading[name])
            if name in named:
                named[name] = value
            else:
                places[self.names.index(name)] = value
        return tuple(places), named

    def _leading(self, count: Any, stream: str) -> Any:
        if count is None:
            return None
        parallel, (rows,) = self.parallel, self.parallel.streams((stream,))
        assert parallel.tokens is not None
        ranks, rank = parallel.tokens.ranks, parallel.tokens.rank
        start = sum(share(rows, ranks, other) for other in range(rank))
        return max(0, min(count - start, share(rows, ranks, rank)))

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """The last layer's result, of all tokens."""
        del layer, args
        parallel, (at, rows) = self.parallel, self.parallel.plan.result
        assert parallel.tokens is not None
        streams = parallel.streams(rows.streams)
        if at is None:
            return parallel.tokens.gather(output, rows.dim, streams)
        whole = parallel.tokens.gather(output[at], rows.dim, streams)
        return (*output[:at], whole, *output[at + 1 :])


class Sequence(_Shared):
    """The tokens among which an attention module attends, on all ranks: its processor's ``_parallel_config``.

    Attributes:
        streams: Their names, in the module's order.
    """

    def __init__(self, parallel: _Parallel, streams: tuple[str, ...]) -> None:
        self._parallel, self.streams = parallel, streams

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention of this rank's tokens to those of all ranks.

        Args:
            query: Shape (B, n, Hq, D), this rank's tokens of all streams.
            key: Shape (B, n, Hkv, D).
            value: Shape (B, n, Hkv, Dv).
            attn_mask: Which of this rank's keys are seen, bool, or what is added to their scores: (B|1, n) or
                (B|1, 1, n), or (B|1, H|1, 1, n). It is the same for all queries.
            is_causal, dropout_p: False and 0.
            scale: Factor of the scores; None for 1 / sqrt(D).

        Returns:
            Shape (B, n, Hq, Dv).

        Raises:
            ShapeError: The tokens are not those of the model's plan.
            OptionError: Something is asked that several ranks do not do.
        """
        parallel = self._parallel
        assert parallel.tokens is not None and parallel.strategy is not None
        streams, ranks, rank = parallel.streams(self.streams), parallel.tokens.ranks, parallel.tokens.rank
        what, remedy = "attention on several ranks", "Leave it out, or run the model on one rank"
        expect(not is_causal, what, "is_causal=False", "True", remedy)
        expect(not dropout_p, what, "dropout_p=0", dropout_p, remedy)
        rows = sum(share(each, ranks, rank) for each in streams)
        wanted = "{} tokens of " + " and ".join(self.streams) + ", as the model's inputs have"
        remedy = "Pass a TokenPlan that says which modules join which streams"
        for name, x in (("query", query), ("key", key), ("value", value)):
            expect(x.shape[1] == rows, name, wanted, x.shape[1], remedy, rows, error=ShapeError)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        bias = None if attn_mask is None else _bias_of_keys(attn_mask, rows, query.dtype)
        return attend_rows(
            query, key, value, bias, scale, streams, parallel.strategy, rank, parallel.tokens.group
        )


def _bias_of_keys(mask: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores of each key, (B|1, n, H|1)."""
    shape = tuple(mask.shape)
    per_key = mask.shape[-1] == rows and mask.ndim in (2, 3, 4) and (mask.ndim == 2 or mask.shape[-2] == 1)
    remedy = "On several ranks a mask says which keys are seen, the same for all queries"
    wanted = "(B, {}), (B, 1, {}) or (B, H, 1, {})"
    expect(per_key, "attn_mask", wanted, shape, remedy, rows, rows, rows, error=ShapeError)
    if mask.dtype == torch.bool:
        hidden = mask.new_full((), -torch.inf, dtype=dtype)
        mask = torch.where(mask, hidden.new_zeros(()), hidden)
    if mask.ndim == 2:
        return mask[:, :, None]
    return mask.transpose(1, 2) if mask.ndim == 3 else mask[:, :, 0].transpose(1, 2)


def _check_skipped(model: nn.Module, skipped: Any) -> None:
    """The first layer cuts, and the last one gathers."""
    if skipped:
        last = len(model.transformer_blocks) - 1  # type: ignore[arg-type]
        fits, remedy = not {0, last} & set(skipped), "Skip others, or run the model on one rank"
        expect(fits, "skip_layers", f"layers 1 to {last - 1} on several ranks", skipped, remedy)


def parallelize(
    transformer: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: str | Strategy = "auto",
    batch: str | None = None,
    plan: TokenPlan | None = None,
) -> nn.Module:
    """Run a transformer of diffusers on several ranks: each has some of the tokens, or of the batch rows.

    Every rank calls it with the same inputs and gets the same, whole output, so pipelines and training loops
    stay as they are. Output and gradients are those of one rank within rounding, for any number of tokens
    and heads. Compile afterwards.

    Gradients of parameters: each rank finds a part of them, scaled so that the *mean* over the ranks is the
    whole. DDP and FSDP2 over the same ranks take that mean; else call `average_gradients`. Gradients of the
    model's inputs are whole on every rank.

    Args:
        transformer: The model; its attention becomes attnspan's, as by `enable`.
        mesh: The ranks. All its dimensions but ``batch`` share the tokens: one, or two (nodes, ranks of a
            node), which must have names.
        strategy: How ranks attend: "exchange", "ring", "ulysses", "hybrid(u, r)", "hybrid(u, r, ring)", or
            "auto", which takes the one that sends least (docs/parallel.md).
        batch: Name of the mesh dimension that shares the batch rows, such as the guided and the unguided one.
        plan: Where the model's tokens are; by default that of its class, for CogVideoX, Flux, Flux 2,
            HunyuanVideo, LTX-Video, Lumina 2, Mochi, PixArt, QwenImage, Stable Diffusion 3 and Wan.

    Returns:
        The transformer.

    Raises:
        OptionError: No plan is known, the mesh or the strategy does not fit, or the model is compiled or
            parallel already.

    Example:
        >>>         >>> from diffusers import FluxTransformer2DModel
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        >>> sizes = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
        >>> widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
        >>> model = FluxTransformer2DModel(**sizes, **widths)
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
    parallel = _Parallel(transformer, plan, group, watch(group), tokens, rows, chosen, names)
    hooked = transformer.register_forward_pre_hook(parallel.enter, with_kwargs=True)
    parallel.undo.append(hooked.remove)
    if rows is not None:
        parallel.undo.append(transformer.register_forward_hook(parallel.leave).remove)
    if tokens is not None:
        _hook_layers(parallel)
        _set_attention(parallel)
    setattr(transformer, _HERE, parallel)
    return transformer


def _plan_of(transformer: nn.Module) -> TokenPlan:
    for each in type(transformer).__mro__:
        if each.__name__ in known_plans:
            return known_plans[each.__name__]
    raise OptionError(
        "transformer",
        expected="a model whose tokens are known: " + ", ".join(known_plans),
        got=type(transformer).__name__,
        remedy="Pass plan=TokenPlan(...)",
    )


def _check_plan(transformer: nn.Module, plan: TokenPlan) -> None:
    """A user's plan names what is there."""
    remedy = "Mend the TokenPlan"
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
    ends = {name.rpartition(".")[2] for name, *_ in _attention(transformer, plan)}
    wrong = sorted(set(plan.attention) - ends)
    expect(not wrong, "TokenPlan: attention", "names of modules that have a processor", wrong, remedy)
    rows = [*plan.stream.values(), *plan.inputs.values(), plan.result[1]]
    rows += [x for each in plan.every.values() for x in (each if isinstance(each, tuple) else (each,))]
    used = {x for each in rows for x in each.streams} | {x for each in plan.attention.values() for x in each}
    wrong = sorted((used | set(plan.leading.values())) - set(plan.rows))
    expect(not wrong, "TokenPlan: streams", f"those that rows counts, {sorted(plan.rows)}", wrong, remedy)


def _check_fresh(transformer: nn.Module) -> None:
    compiled = any(getattr(x, "_compiled_call_impl", None) is not None for x in transformer.modules())
    compiled = compiled or hasattr(transformer, "_orig_mod")
    remedy = "Call parallelize first, then compile"
    expect(not compiled, "transformer", "one that is not compiled", "a compiled one", remedy)
    remedy = "Call unparallelize(transformer) first"
    expect(not hasattr(transformer, _HERE), "transformer", "one on one rank", "one on several", remedy)


def _parts(
    transformer: nn.Module, plan: TokenPlan, mesh: DeviceMesh, strategy: str | Strategy, batch: str | None
) -> tuple[_Part | None, _Part | None, Any, Strategy | None]:
    """The ranks that share tokens, those that share batch rows, the group of all, and the strategy."""
    if batch is None:
        group = group_of(mesh)
        chosen = _strategy(transformer, plan, mesh, strategy)
        return _Part(group.size(), group.rank(), group.group_name), None, group, chosen
    names = mesh.mesh_dim_names or ()
    remedy = "Make it with mesh_dim_names=..., and pass the name of one"
    expect(batch in names, "batch", f"a dimension of the mesh, of {names}", repr(batch), remedy)
    group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    of_rows = mesh[batch].get_group()
    rows = _Part(of_rows.size(), of_rows.rank(), of_rows.group_name)
    others = tuple(name for name in names if name != batch)
    if not others:
        return None, rows, group, None
    rest = mesh[others]
    of_tokens = group_of(rest)
    chosen = _strategy(transformer, plan, rest, strategy)
    return _Part(of_tokens.size(), of_tokens.rank(), of_tokens.group_name), rows, group, chosen


def _strategy(
    transformer: nn.Module, plan: TokenPlan, mesh: DeviceMesh, strategy: str | Strategy
) -> Strategy:
    ranks = group_of(mesh).size()
    if strategy == "auto":
        heads = next(module.heads for _, module, _ in _attention(transformer, plan))
        # With full attention what is sent grows with the tokens alike for all strategies.
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
    """Attention modules that the plan names, with their streams."""
    for layer in _layers(transformer, plan):
        for name, module in layer.named_modules():
            if streams := _streams_of(plan, name, module):
                yield name, module, streams


def _streams_of(plan: TokenPlan, name: str, module: nn.Module) -> tuple[str, ...]:
    """The streams among which a module of a layer attends; none if it is no such one."""
    known = getattr(module, "processor", None) is not None
    return plan.attention.get(name.rpartition(".")[2], ()) if known else ()


def _hook_layers(parallel: _Parallel) -> None:
    layers = _layers(parallel.model, parallel.plan)
    for at, layer in enumerate(layers):
        hooks = _Layer(parallel, layer, first=at == 0)
        parallel.undo.append(layer.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
        if at == len(layers) - 1:
            parallel.undo.append(layer.register_forward_hook(hooks.after).remove)


def _set_attention(parallel: _Parallel) -> None:
    from .diffusers import enable

    enable(parallel.model)
    known: dict[tuple[str, ...], Sequence] = {}
    for _, module, streams in list(_attention(parallel.model, parallel.plan)):
        before = module.processor
        sequence, make = known.setdefault(streams, Sequence(parallel, streams)), parallel.plan.processor
        # Its own one: others may share it that do not attend among these tokens.
        module.processor = copy.copy(before) if make is None else make(sequence)
        module.processor._parallel_config = sequence
        parallel.undo.append(lambda module=module, before=before: setattr(module, "processor", before))


def _parallel_of(transformer: nn.Module) -> _Parallel:
    parallel = getattr(transformer, _HERE, None)
    remedy = "Pass the model that parallelize was given"
    expect(parallel is not None, "transformer", "one on several ranks", "one on one rank", remedy)
    return parallel  # type: ignore[return-value]


def unparallelize(transformer: nn.Module) -> nn.Module:
    """Undo `parallelize`: the transformer is one rank's again. Its attention stays attnspan's; see `disable`.

    Returns:
        The transformer.

    Raises:
        OptionError: It is not parallel.
    """
    parallel = _parallel_of(transformer)
    remedy = "Undo the model that was copied, or copy before parallelize"
    expect(parallel.model is transformer, "transformer", "no copy of a parallel model", "a copy", remedy)
    for each in reversed(parallel.undo):
        each()
    delattr(transformer, _HERE)
    return transformer


@contextmanager
def parallelized(transformer: nn.Module, mesh: DeviceMesh, **options: Any) -> Iterator[nn.Module]:
    """`parallelize` as a context, which undoes it at its end.

    Args:
        transformer, mesh: As there.
        **options: As there.
    """
    parallelize(transformer, mesh, **options)
    try:
        yield transformer
    finally:
        unparallelize(transformer)


def average_gradients(transformer: nn.Module) -> None:
    """Average the gradients of the parameters over the ranks, in place: after ``backward``, without DDP or FSDP2.

    Args:
        transformer: What `parallelize` was given.

    Raises:
        OptionError: It is not parallel, or a parameter is a DTensor, whose gradient FSDP2 averages.
    """
    group = _parallel_of(transformer).group
    sum_gradients(transformer.parameters(), group)
    for parameter in transformer.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad /= group.size()
