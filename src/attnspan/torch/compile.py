"""Support for compiled, exported and checkpointed programs, besides the operators of attention.

- The operator ``attnspan::encode`` turns booleans of a compiled program into spans.
- Errors keep their text while a compiler traces a program.
- Masks and biases are pytrees.
- There is a policy for selective checkpointing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from attnspan.base.pytrees import register_pytrees
from attnspan.call.backend import asked, backend
from attnspan.errors import expect, register_raiser
from attnspan.masks.bounds import Spans
from attnspan.masks.encoding import CHUNK_PAIRS, encode, register_operator

from . import compat
from ._autograd import define
from ._signature import library
from ._vendor import vendor_op
from ._vmap import encode_rule
from ._watched import constant_when_traced
from .compat import pytree
from .ops import forward_op, named_op


def _new_bounds(visible: Tensor, runs: int) -> Tensor:
    return visible.new_empty((*visible.shape[:3], runs, 2), dtype=torch.int32)


def _encoder(encode_rows: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A kernel of the operator. It encodes a limited number of queries at once, to bound its memory."""

    def kernel(visible: Tensor, runs: int) -> Tensor:
        bounds = _new_bounds(visible, runs)
        pairs = visible.shape[0] * visible.shape[1] * visible.shape[3]
        step = max(CHUNK_PAIRS // max(pairs, 1), 1)
        for i in range(0, visible.shape[2], step):
            bounds[:, :, i : i + step] = encode_rows(visible[:, :, i : i + step], runs)
        return bounds

    return kernel


@_encoder
def _encode_cpu(visible: Tensor, runs: int) -> Tensor:
    """Bounds of all queries. Raises an OptionError if a query has more than ``runs`` runs."""
    return torch.from_numpy(encode(visible.numpy(), runs, "from_predicate, from_dense, keys"))


@_encoder
def _encode_device(visible: Tensor, runs: int) -> Tensor:
    """Bounds of all queries without a synchronization. Each span of a query with too many runs is (0, -1)."""
    # The edges of a query's runs alternate between starts and stops. Edge n is an end of span n // 2.
    padded = torch.nn.functional.pad(visible, (1, 1))
    edges = padded[..., 1:] != padded[..., :-1]
    rank = edges.cumsum(-1, dtype=torch.int32)
    slot = torch.where(edges & (rank <= 2 * runs), rank - 1, 2 * runs)
    places = torch.arange(edges.shape[-1], dtype=torch.int32, device=visible.device).expand(edges.shape)
    ends = places.new_zeros((*edges.shape[:-1], 2 * runs + 1)).scatter_(-1, slot.long(), places)
    bounds = ends[..., :-1].reshape(*ends.shape[:-1], runs, 2)
    broken = rank[..., -1:, None] > 2 * runs
    return torch.where(broken, torch.arange(0, -2, -1, dtype=torch.int32, device=visible.device), bounds)


_ENCODE = "encode(Tensor visible, int runs) -> Tensor"
encode_op = define(library, _ENCODE, _new_bounds, CPU=_encode_cpu, CUDA=_encode_device)
torch.library.register_vmap(encode_op, encode_rule(encode_op), lib=library)
register_operator("torch", encode_op)


def _raise(kind: type[Exception], text: str) -> None:
    """Raise an error from within the compiler while it traces the program that raises the error."""
    if torch.compiler.is_dynamo_compiling():
        _raise_now(kind, text)


# The compiler runs this function while it traces the call, because a traced error would lose its text. After
# a graph break Python runs it, and the ordinary error is raised: the compiler would cut the frames of the
# user's code from its own error.
@constant_when_traced
def _raise_now(kind: type[Exception], text: str) -> None:
    if compat.TracingContext.try_get() is not None:
        raise _traced(kind)(text)  # type: ignore[arg-type]


@cache
def _traced(kind: type[Exception]) -> type[Exception]:
    """`kind` as an error that the compiler passes on unchanged. Without fullgraph it breaks the graph."""
    unsupported = compat.unsupported_by_compiler()

    def initialise(self: Any, text: str) -> None:
        unsupported.__init__(self, text)  # type: ignore[call-arg]

    body = {"__module__": kind.__module__, "__init__": initialise, "public": kind}
    return type(kind.__name__, (kind, unsupported), body)


register_raiser(_raise)


def _collate(batch: list[Any], **_: Any) -> Any:
    """Merge the masks of examples. Equal masks stay as they are, and arrays of shape (S,) become (B, S)."""
    first, *others = batch
    if all(x == first for x in others):
        return first
    trees = [pytree.tree_flatten(x) for x in batch]
    # Masks without arrays differ in something that is not a field.
    alike = bool(trees[0][0]) and all(spec == trees[0][1] for _, spec in trees)
    remedy = "Make the mask of the batch from the collated arrays"
    expect(alike, "default_collate", "masks of one structure", " and ".join(map(repr, batch[:2])), remedy)
    columns = list(zip(*(leaves for leaves, _ in trees), strict=True))
    for column in columns:
        shapes = {tuple(x.shape) for x in column}
        expected, got = "arrays (S,) of one length", " and ".join(map(str, sorted(shapes)))
        expect(len(shapes) == 1 and column[0].ndim == 1, "default_collate", expected, got, remedy)
    return pytree.tree_unflatten(
        [torch.stack([torch.as_tensor(x) for x in column]) for column in columns], trees[0][1]
    )


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    def flatten_to_list(x: Any) -> tuple[list[Any], Any]:
        if cls is Spans and x._k_len is not None:
            # The number of keys is a leaf. In the context it would specialize a program.
            return [x.bounds, x._k_len], (("bounds", "_k_len"), ())
        children, context = flatten(x)
        return list(children), context

    def flatten_with_keys(x: Any) -> tuple[list[Any], Any]:
        children, context = flatten_to_list(x)
        return [
            (pytree.GetAttrKey(name), child) for name, child in zip(context[0], children, strict=True)
        ], context

    def unflatten_children(children: Any, context: Any) -> Any:
        return unflatten(tuple(children), context)

    pytree.register_pytree_node(
        *(cls, flatten_to_list, unflatten_children),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_as_tuples,
    )
    compat.default_collate_fn_map.setdefault(cls, _collate)
    # torch.export.load reads a program's example inputs, and these may contain masks.
    torch.serialization.add_safe_globals([cls])


def _as_tuples(value: Any) -> Any:
    """Turn the lists that JSON makes back into tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


register_pytrees(_register)

#: Operators whose outputs a policy should save. They cost most to recompute, and their outputs are O(S).
SAVE_OPS: tuple[compat.OpOverload, ...] = (forward_op, named_op, vendor_op, encode_op)
_saved = set(SAVE_OPS)


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of attention, and of masks encoded in a compiled program. Recompute everything else.

    Pass this policy to ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. The forward kernel
    then runs once per step instead of twice.

    Returns:
        ``MUST_SAVE`` for `SAVE_OPS` and the operators of `wrap`, else ``PREFER_RECOMPUTE``.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> block, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        >>> checkpoint(block, x, use_reentrant=False, context_fn=contexts).shape
        torch.Size([2, 4])
    """
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if op in _saved else CheckpointPolicy.PREFER_RECOMPUTE


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_backend(context_fn: Callable[[], Contexts] = noop_context_fn) -> Contexts:
    """Recompute the calls of a checkpoint with the backend of the forward pass's block.

    Torch recomputes during the backward pass, when a block of `attnspan.backend` may have ended. Another
    backend would save other tensors, and torch would raise a `CheckpointError`.

    Args:
        context_fn: Another ``context_fn`` for the same checkpoint, for example a partial of
            ``create_selective_checkpoint_contexts``.

    Returns:
        The contexts of the forward pass and of the recomputation, for ``context_fn`` of
        ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Example:
        >>> import attnspan
        >>> from torch.utils.checkpoint import checkpoint
        >>> from attnspan.torch import attention, keep_backend
        >>> x = torch.randn(1, 2, 4, 8, requires_grad=True)
        >>> with attnspan.backend("math"):
        ...     out = checkpoint(attention, x, x, x, use_reentrant=False, context_fn=keep_backend)
        >>> out.sum().backward()
    """
    forward, recomputation = context_fn()
    return forward, _Both(backend(asked(None)), recomputation)


class _Both(AbstractContextManager[None]):
    """Two contexts as one. A retained graph enters it once for each backward pass."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def save_also(op: compat.OpOverload) -> None:
    """Let `checkpoint_policy` save the results of another operator of attention."""
    _saved.add(op)
