"""Checks for your own models: isolation of packed documents, and agreement of many ranks with one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnspan.base.installed import require
from attnspan.errors import OptionError, ShapeError, expect

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Isolation", "Leak", "assert_isolated", "assert_same_as_one_rank", "probe"]

# Names of the tokens in a batch, before or after the embedding.
_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "x")


@dataclass(frozen=True)
class Isolation:
    """Result of `probe`. You can ``print`` it.

    Attributes:
        documents: Number of documents that were changed, one at a time.
        leaks: A `Leak` for each document that other documents see.

    Example:
        >>> print(Isolation(documents=2))
        2 documents, none sees another
    """

    documents: int
    leaks: tuple[Leak, ...] = ()

    @property
    def isolated(self) -> bool:
        """Whether no document sees another."""
        return not self.leaks

    def __str__(self) -> str:
        if self.isolated:
            return f"{self.documents} documents, none sees another"
        return "\n".join(map(str, self.leaks))


@dataclass(frozen=True)
class Leak:
    """A document that other documents see.

    Attributes:
        document: Number of the document.
        module: First module where results of another document change.
        rows: The tokens whose results change, as (batch element, token).
        change: Largest change, as a fraction of the largest result.

    Example:
        >>> print(Leak(document=0, module="layer", rows=((0, 2),), change=3.0))
        document 0 is seen by 1 tokens of others, first in layer: (batch element, token) (0, 2). They change \
by 3.0e+00 of their size
    """

    document: int
    module: str
    rows: tuple[tuple[int, int], ...]
    change: float = field(compare=False)

    def __str__(self) -> str:
        shown = ", ".join(f"({b}, {s})" for b, s in self.rows[:4]) + ", ..." * (len(self.rows) > 4)
        return (
            f"document {self.document} is seen by {len(self.rows)} tokens of others, first in {self.module}: "
            f"(batch element, token) {shown}. They change by {self.change:.1e} of their size"
        )


def probe(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    documents: Tensor,
    *,
    within: float = 1e-4,
    call: Callable[..., Any] | None = None,
) -> Isolation:
    """Change one document after the other, and find the results of other documents that change.

    You can pass any model with any attention. It runs in evaluation mode without gradients, once for each
    document of each batch element and once more. The results of a token are its entries in every tensor
    (B, S, ...) that a module returns.

    Args:
        model: The model, which is called as ``model(**batch)``.
        batch: Keyword arguments of the model. The tokens are the first of "input_ids" (integer, (B, S)),
            "inputs_embeds", "hidden_states" and "x" (floating, (B, S, ...)).
        documents: Integer (B, S) or (S,), the document number of each token within its batch element. A
            negative number means padding, whose results do not count.
        within: Largest change that counts as rounding, as a fraction of the largest result.
        call: A function to call instead of the model, for example the compiled model. Only final results are
            then compared.

    Raises:
        OptionError: If the batch has no tokens.
        ShapeError: If ``documents`` has another shape, or if the model returns no results of shape
            (B, S, ...).

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> tokens = torch.arange(6)[None]
        >>> print(probe(model, {"input_ids": tokens}, tokens // 3, call=lambda input_ids: model(input_ids)))
        2 documents, none sees another
    """
    torch = require("torch", "attnspan.testing", "torch")
    name = next((x for x in _INPUTS if x in batch), None)
    got, remedy = ", ".join(batch) or "nothing", "Pass the tokens under one of these names"
    if name is None:
        raise OptionError("batch", expected=f"one of {', '.join(_INPUTS)}", got=got, remedy=remedy)
    tokens = batch[name]
    documents, shape = torch.as_tensor(documents, device=tokens.device), tuple(tokens.shape[:2])
    given, remedy = tuple(documents.shape), "Pass one document number for each token"
    fits = given in (shape, (1, *shape[1:]), shape[1:])
    expect(fits, "documents", "shape {}", given, remedy, shape, error=ShapeError)
    documents = documents.expand(shape)
    run = _Runner(model, batch, name, call)
    before = run(tokens)
    rows = torch.arange(len(documents), device=documents.device)[:, None]
    numbers = sorted({(row, n) for row, of in enumerate(documents.tolist()) for n in of if n >= 0})
    leaks = []
    for row, n in numbers:
        own = (documents == n) & (rows == row)
        found = _first_change(before, run(_changed(tokens, own)), (documents >= 0) & ~own, within)
        leaks += [Leak(n, *found)] if found else []
    return Isolation(len(numbers), tuple(leaks))


def assert_isolated(
    model: torch.nn.Module, batch: Mapping[str, Any], documents: Tensor, **options: Any
) -> None:
    """Raise an AssertionError if a packed document sees another document.

    The error names the first module and the tokens where this happens.

    Args:
        model, batch, documents, **options: As for `probe`.

    Raises:
        AssertionError: If a document sees another document.
        OptionError, ShapeError: As `probe`.

    Example:
        >>> import torch
        >>> class Shift(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.roll(1, 1)
        >>> assert_isolated(Shift(), {"x": torch.ones(1, 4, 2)}, torch.tensor([-1, 0, 1, 1]))
        Traceback (most recent call last):
        AssertionError: document 0 is seen by 1 tokens of others, first in Shift: (batch element, \
token) (0, 2). They change by 3.0e+00 of their size. Give attention a document mask: \
transformers makes it from position_ids, without attention_mask.
    """
    found = probe(model, batch, documents, **options)
    if not found.isolated:
        remedy = "Give attention a document mask: transformers makes it from position_ids"
        raise AssertionError(f"{found}. {remedy}, without attention_mask.")


class _Runner:
    """Runner of the model that keeps the results of each module for tokens, in order."""

    def __init__(
        self, model: Any, batch: Mapping[str, Any], name: str, call: Callable[..., Any] | None
    ) -> None:
        self.model, self.batch, self.name, self.call = model, dict(batch), name, call

    def __call__(self, tokens: Tensor) -> list[tuple[str, Tensor]]:
        import torch

        found: list[tuple[str, Tensor]] = []

        def keep(name: str, out: Any) -> None:
            shown = [x for x in _tensors(out) if x.shape[:2] == tokens.shape[:2] and x.is_floating_point()]
            found.extend((name, x.detach().clone()) for x in shown)

        def hook_of(name: str) -> Any:
            return lambda _, __, out: keep(name, out)

        named = list(self.model.named_modules()) if self.call is None else []
        hooks = [x.register_forward_hook(hook_of(name or type(x).__name__)) for name, x in named]
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                out = (self.model if self.call is None else self.call)(**{**self.batch, self.name: tokens})
            keep("the result", out)
        finally:
            self.model.train(training)
            for hook in hooks:
                hook.remove()
        remedy = "Pass a batch for which the model returns results for each token"
        expect(
            found,
            "model",
            "results of shape {} and more",
            "none",
            remedy,
            (*tokens.shape[:2],),
            error=ShapeError,
        )
        return found


def _tensors(out: Any) -> list[Any]:
    """The tensors of a result: one tensor, or the tensors of a tuple, list or mapping."""
    if hasattr(out, "is_floating_point"):
        return [out]
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else ()
    return [x for part in parts for x in _tensors(part)]


def _changed(tokens: Tensor, own: Tensor) -> Tensor:
    """Replace the tokens of one document. Integers stay within the vocabulary."""
    import torch

    if not tokens.is_floating_point():
        return torch.where(own, torch.where(tokens > 0, tokens - 1, 1), tokens)
    mask = own.reshape(*own.shape, *[1] * (tokens.dim() - 2))
    return torch.where(mask, -tokens - 1, tokens)


def _first_change(
    before: list[tuple[str, Tensor]], after: list[tuple[str, Tensor]], others: Tensor, within: float
) -> tuple[str, tuple[tuple[int, int], ...], float] | None:
    """The first module that changes ``others``, the changed tokens, and the change. None if none changes."""
    for (name, x), (_, y) in zip(before, after, strict=True):
        known = x[others]
        finite = known[known.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 0.0
        # Equal infinities, for example masked logits, are no change.
        change = (x.double() - y.double()).abs().masked_fill(x == y, 0)
        change = change.flatten(2).amax(-1) if change.dim() > 2 else change
        rows = others & ~(change <= within * max(size, 1e-30))
        if bool(rows.any()):
            at = tuple((int(b), int(s)) for b, s in rows.nonzero().tolist())
            return name, at, float(change[rows].max()) / max(size, 1e-30)
    return None


def assert_same_as_one_rank(
    step: Callable[[Any, Any], Mapping[str, Tensor]], batch: Any, mesh: Any, *, within: float = 1e-4
) -> None:
    """Raise an AssertionError, on all ranks, unless a sharded step gives the results of one rank.

    The tags of a sharded batch tell which tokens it holds. They do not show labels that were shifted after
    sharding, ids of another batch, or old tensors in a new batch. This check finds all of these. It is a
    collective, so call it on all ranks. A batch of a few hundred tokens is enough.

    Args:
        step: One forward and backward pass. ``step(batch, None)`` computes the whole batch on one rank.
            ``step(batch, mesh)`` shards as your training loop does, from the same parameters. Both return
            named tensors, in the order of the model. The error explains the first tensor of tokens that
            differs, else the first tensor. These tensors are compared:

            - "q_index": in a sharded step, ``rows["q_index"]``.
            - Tensors of tokens, such as embeddings, logits and losses: (B, S, ...) for the whole batch, and
              (B, n, ...) for a rank.
            - Tensors without dims: a rank's part of a sum over ranks, such as its part of the loss.
            - Any other tensor is the same on all ranks, such as gradients of parameters as the optimizer sees
              them.
        batch: Inputs of the whole batch, the same on all ranks.
        mesh: The DeviceMesh of the plans.
        within: Largest difference that counts as rounding, as a fraction of the size of a token's entries or
            of a tensor.

    Raises:
        AssertionError: If a tensor differs. The error names the tensors and tokens, and the usual cause.
        ValueError: If the two steps return other names, or shapes that do not fit "q_index".

    Example:
        >>> assert_same_as_one_rank(step, batch, mesh)  # doctest: +SKIP
        Traceback (most recent call last):
        AssertionError: losses: 2 of 32 rows differ, by up to 1.9e+00 of their size, on ranks [0, 1]: \
(batch row, token) (0, 11), (0, 31). These are the last rows of runs of neighbours that a rank holds: \
labels or targets were shifted after sharding. Look at neighbours before layout.shard(...).
    """
    require("torch", "attnspan.testing", "torch")
    from attnspan.parallel.torch.alike import differences

    found = differences(dict(step(batch, None)), dict(step(batch, mesh)), mesh, within)
    if found:
        raise AssertionError("\n".join(found))
