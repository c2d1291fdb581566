"""Hooks that cut a transformer's tokens and batch for a rank and gather them, and attention among them.

Each hook is a method, because the compiler can trace methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from attnspan.errors import ShapeError, expect
from attnspan.torch.compat import pytree

from ._diffusers_plans import Rows, TokenPlan
from ._diffusers_rows import attend_rows, entered
from ._patches import Patches


class _Shared:
    """Parts that a copy of a model shares with it."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(eq=False)
class Parallel(_Shared):
    """Result of `parallelize`, for a transformer.

    Attributes:
        model: The transformer.
        plan: The place of its tokens.
        whole: Name of the group of all ranks.
        tokens: The ranks that share tokens, a `Part`, or None.
        batch: The ranks that share the batch, a `Part`, or None.
        strategy: How the ranks in ``tokens`` attend, or None.
        names: Names of the model's inputs.
        rows: Tokens of each stream in the current call.
        patches: The hooks and processors.
        before: `rows`, keyed by an argument of a layer. A checkpoint recomputes a layer with the same
            argument.
    """

    model: nn.Module
    plan: TokenPlan
    whole: str
    tokens: Any
    batch: Any
    strategy: Any
    names: list[str]
    rows: dict[str, Any] = field(default_factory=dict)
    patches: Patches = field(default_factory=lambda: Patches("the transformer"))
    before: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def streams(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the tokens of some streams."""
        return tuple(self.rows[name] for name in names)

    def recall(self, x: Any) -> None:
        """Restore the `rows` of the call that this argument of a layer belongs to, also within backward."""
        if not torch.compiler.is_compiling() and isinstance(x, Tensor):
            self.rows = self.before.setdefault(x, self.rows)  # type: ignore[no-untyped-call]

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return all inputs by keyword, with this rank's batch elements, and count the tokens."""
        inputs, self.rows = dict(zip(self.names, args, strict=False)) | kwargs, {}
        for name in self.plan.refused:
            remedy = "Leave it out, or call unparallelize(transformer) before"
            expect(inputs.get(name) is None, f"{name} on several ranks", "None", "something", remedy)
        inputs = self._entered(inputs)
        if self.batch is not None:
            count = inputs["hidden_states"].shape[0]
            remedy = "Pass guided and unguided samples in one batch, or use a mesh with fewer ranks for it"
            what, wanted = "hidden_states", "at least {} batch elements, one for each rank of the batch"
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
            remedy = "Skip other layers, because the first layer cuts the tokens"
            skipped = inputs.get("skip_layers") or ()
            expect(0 not in skipped, "skip_layers on several ranks", "no layer 0", skipped, remedy)
        return (), inputs

    def _entered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        sizes = [n for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) for n in (x.ndim, *x.shape)]
        found = {}
        for name, x in inputs.items():
            if name == "hidden_states" or (isinstance(x, Tensor) and x.requires_grad):
                found[name] = entered(x, self.whole, sizes if name == "hidden_states" else [])
        return inputs | found

    def _of_batch(self, x: Any, count: Any) -> Any:
        if isinstance(x, Tensor):
            return self.batch.cut(x, 0, (count,)) if x.ndim and x.shape[0] == count else x
        if isinstance(x, dict):
            return {name: self._of_batch(value, count) for name, value in x.items()}
        if isinstance(x, (list, tuple)) and len(x):
            if all(isinstance(value, Tensor) for value in x):
                return type(x)([self._of_batch(value, count) for value in x])
            if len(x) == count and all(isinstance(value, (list, tuple)) for value in x):
                start = self.batch.begin(count)
                return x[start : start + self.batch.share(count)]
        return x

    def _cut(self, name: str, x: Any, rows: Rows | tuple[Rows, ...]) -> Any:
        """Return a rank's tokens of an argument: a tensor, a tuple or list of them, or None."""
        if isinstance(x, (tuple, list)):
            each = rows if isinstance(rows, tuple) else (rows,) * len(x)
            return type(x)([self._cut(name, part, of) for part, of in zip(x, each, strict=True)])
        if not isinstance(x, Tensor):
            return x
        assert isinstance(rows, Rows)
        if rows.ndim is not None and x.ndim != rows.ndim:
            return x
        streams, got = self.streams(rows.streams), x.shape[rows.dim]
        if got == 1:
            return x
        fits, size = got == sum(streams), tuple(x.shape)
        wanted, remedy = "{} tokens along dimension {}", "Pass it whole, because each rank takes its own part"
        expect(fits, name, wanted, size, remedy, sum(streams), rows.dim, error=ShapeError)
        return self.tokens.cut(x, rows.dim, streams)

    def leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Gather the batch elements of all ranks."""
        del model, args
        rows = (self.rows["batch"],)
        if isinstance(output, tuple):
            return (self.batch.gather(output[0], 0, rows), *output[1:])
        output.sample = self.batch.gather(output.sample, 0, rows)
        return output


class LayerHooks(_Shared):
    """The hooks of one layer."""

    def __init__(self, parallel: Parallel, layer: nn.Module) -> None:
        self.parallel = parallel
        self.names = list(inspect.signature(layer.forward).parameters)
        plan = parallel.plan
        self.attending = [name for name, module in layer.named_modules() if streams_of(plan, name, module)]

    # The first layer has two hooks, so that the second hook is the same for all layers and compiles once.

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut the streams to this rank's tokens."""
        del layer
        return self._changed(args, kwargs, self.parallel.plan.stream, {})

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut the arguments that each layer gets whole to this rank's tokens."""
        parallel = self.parallel
        for name in self.attending:
            module = layer.get_submodule(name)
            fits = isinstance(getattr(module.processor, "_parallel_config", None), Sequence)
            remedy = "Call unparallelize and parallelize again after you exchange processors"
            what, wanted = f"processor of {name}", "the processor from parallelize"
            expect(fits, what, wanted, type(module.processor).__name__, remedy)
        return self._changed(args, kwargs, parallel.plan.every, parallel.plan.leading)

    def _changed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Mapping[str, Any],
        leading: Mapping[str, str],
    ) -> Any:
        def change(name: str, value: Any) -> Any:
            if name in rows:
                return self.parallel._cut(name, value, rows[name])
            return self._leading(value, leading[name]) if name in leading else value

        self.parallel.recall(args[0] if args else kwargs.get(self.names[0]))
        places = [change(*each) for each in zip(self.names, args, strict=False)]
        return (*places, *args[len(places) :]), {name: change(name, value) for name, value in kwargs.items()}

    def _leading(self, count: Any, stream: str) -> Any:
        if count is None:
            return None
        tokens, (rows,) = self.parallel.tokens, self.parallel.streams((stream,))
        return max(0, min(count - tokens.begin(rows), tokens.share(rows)))

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Gather the last layer's result for all tokens."""
        del layer, args
        at = self.parallel.plan.result[0]
        if not isinstance(at, int):
            return self._whole(output)
        return (*output[:at], self._whole(output[at]), *output[at + 1 :])

    def meet(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather the first argument of a module after the last layer."""
        del module
        return self._whole(args[0]), *args[1:]

    def _whole(self, x: Tensor) -> Tensor:
        rows = self.parallel.plan.result[1]
        found: Tensor = self.parallel.tokens.gather(x, rows.dim, self.parallel.streams(rows.streams))
        return found


class Sequence(_Shared):
    """The tokens of all ranks among which an attention module attends. A processor's ``_parallel_config``.

    Attributes:
        streams: The names of the streams, in the module's order.
    """

    def __init__(self, parallel: Parallel, streams: tuple[str, ...]) -> None:
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
        """Attend from this rank's tokens to all ranks' tokens.

        Args:
            query: Shape (B, n, Hq, D), this rank's tokens of all streams.
            key: Shape (B, n, Hkv, D).
            value: Shape (B, n, Hkv, Dv).
            attn_mask: This rank's keys: bool, True for visible keys, or floating to add to their scores.
                Shape (B|1, n), (B|1, 1, n) or (B|1, H|1, 1, n). It is the same for all queries.
            is_causal: Must be False.
            scale: Factor of the scores. Default: 1/sqrt(D).
            dropout_p: Must be 0.

        Returns:
            Shape (B, n, Hq, Dv).

        Raises:
            ShapeError: The number of tokens differs from the model's plan.
            OptionError: Several ranks do not support an option.
        """
        parallel = self._parallel
        streams, tokens = parallel.streams(self.streams), parallel.tokens
        what, remedy = "attention on several ranks", "Leave the option out, or run the model on one rank"
        expect(not is_causal, what, "is_causal=False", "True", remedy)
        expect(not dropout_p, what, "dropout_p=0", dropout_p, remedy)
        rows = sum(map(tokens.share, streams))
        wanted = "{} tokens of " + " and ".join(self.streams) + ", as in the model's inputs"
        remedy = "Pass a TokenPlan that says which modules join which streams"
        for name, x in (("query", query), ("key", key), ("value", value)):
            expect(x.shape[1] == rows, name, wanted, x.shape[1], remedy, rows, error=ShapeError)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        bias = None if attn_mask is None else _bias_of_keys(attn_mask, rows, query.dtype)
        return attend_rows(query, key, value, bias, scale, streams, parallel.strategy, tokens)


def _bias_of_keys(mask: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to the scores of each key, (B|1, n, H|1)."""
    shape = tuple(mask.shape)
    per_key = mask.shape[-1] == rows and mask.ndim in (2, 3, 4) and (mask.ndim == 2 or mask.shape[-2] == 1)
    remedy = "On several ranks, pass a mask of keys that is the same for all queries"
    wanted = "(B, {}), (B, 1, {}) or (B, H, 1, {})"
    expect(per_key, "attn_mask", wanted, shape, remedy, rows, rows, rows, error=ShapeError)
    if mask.dtype == torch.bool:
        hidden = mask.new_full((), -torch.inf, dtype=dtype)
        mask = torch.where(mask, hidden.new_zeros(()), hidden)
    if mask.ndim == 2:
        return mask[:, :, None]
    return mask.transpose(1, 2) if mask.ndim == 3 else mask[:, :, 0].transpose(1, 2)


def streams_of(plan: TokenPlan, name: str, module: nn.Module) -> tuple[str, ...]:
    """Return the streams among which a module of a layer attends. None if it is not an attention module."""
    known = getattr(module, "processor", None) is not None
    return plan.attention.get(name.rpartition(".")[2], ()) if known else ()
