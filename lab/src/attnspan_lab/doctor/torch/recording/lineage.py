"""Lineage of attention's operands: the functions that made them, with their lines and results."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place, lines_of
from attnspan_lab.doctor.torch.masks.forms import arguments
from attnspan_lab.doctor.torch.recording.calls import is_attention, softmax_arguments
from attnspan_lab.doctor.torch.recording.operators import is_plain, storage

__all__ = ["JOINS", "Attend", "Lineage", "Node", "apart", "backwards", "cache_of", "origin"]

JOINS = ("cat", "concat", "concatenate", "stack")
_PRODUCTS = ("matmul", "bmm", "__matmul__", "einsum")
_LETTERS = "ABCDEFG"  # Names of the leading dims of a product, where an equation does not name them.
#: Name of a node that stands for a change in place.
_WRITE = "write"


@dataclass(eq=False)
class Node:
    """A result of a torch function. A tensor that no watched function made has no name.

    Attributes:
        name, lines: The function, and the user's lines that lead to it, the innermost first.
        value: Contents at that time.
        inputs: Nodes of the arguments.
        order: Number of the function in the run.
        equation: Of an einsum.
    """

    name: str
    lines: tuple[Place, ...]
    value: Tensor
    inputs: tuple[Node, ...]
    order: int
    equation: str = ""

    @property
    def place(self) -> Place | None:
        """The innermost of the user's lines."""
        return self.lines[0] if self.lines else None

    @property
    def is_join(self) -> bool:
        """Whether the function writes new entries next to old ones."""
        return self.name == _WRITE or self.copies

    @property
    def copies(self) -> bool:
        """Whether the function copies old and new entries into a new tensor."""
        return self.name in JOINS


@dataclass(eq=False)
class Attend:
    """Operands of an attention call. ``order`` is the number of the call among all functions.

    ``result`` is known only of a call that is written out.
    """

    query: Node
    key: Node
    value: Node | None
    mask: Node | None
    order: int
    result: Node | None = None


class Lineage(TorchFunctionMode):
    """Records how each tensor of a run was made.

    Args:
        lines: Lines of softmax functions that are part of attention.
    """

    def __init__(self, lines: Collection[Place]) -> None:
        super().__init__()
        self.lines, self.order = lines, 0
        #: Operands of each attention call. None if they are unknown.
        self.attends: list[Attend | None] = []
        #: Calls that are written out, by the result of their softmax.
        self.weights: dict[Node, Attend] = {}
        self.nodes: dict[int, Node] = {}
        self.writes: dict[int, Node] = {}
        self.kept: list[Any] = []  # Numbers of objects are unique only while the objects exist.

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(fn, "__name__", "")
        if name == "__get__":  # An attribute, such as x.mT.
            name = getattr(getattr(fn, "__self__", None), "__name__", name)
        if name == "scaled_dot_product_attention":
            self._attends(arguments(args, kwargs))
        given = softmax_arguments(args, kwargs) if name == "softmax" else {}
        written = bool(given) and is_attention(given, self.lines)
        if written:
            self._attends_by(self._node(given["scores"]))
        tensors = [x for x in tree_leaves((args, kwargs)) if is_plain(x)]
        inputs = tuple(self._node(x) for x in tensors)
        out = fn(*args, **kwargs)
        self.order += 1
        made = [x for x in tree_leaves(out) if is_plain(x)]
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if (changes or (name.startswith("__i") and made)) and tensors:
            node = Node(_WRITE, _lines(), _copy(tensors[0]), inputs, self.order)
            self.writes[storage(tensors[0])] = self.nodes[id(tensors[0])] = node
            self.kept.append(tensors[0])
            return out
        lines = _lines() if made else ()
        equation = args[0] if name == "einsum" and isinstance(args[0], str) else ""
        for x in made:
            node = self.nodes[id(x)] = Node(name, lines, _copy(x), inputs, self.order, equation)
            self.kept.append(x)
            if written and self.attends[-1] is not None:
                self.weights[node] = self.attends[-1]
            elif name in _PRODUCTS and self.weights:
                self._takes_values(node)
        return out

    def _node(self, x: Tensor) -> Node:
        found, write = self.nodes.get(id(x)), self.writes.get(storage(x))
        if write is not None and (found is None or write.order > found.order):
            found = Node(_WRITE, write.lines, _copy(x), write.inputs, write.order)
        if found is None:
            found = Node("", (), _copy(x), (), -1)
            self.kept.append(x)
        self.nodes[id(x)] = found
        return found

    def _attends(self, given: dict[str, Any]) -> None:
        q, k, v = (self._node(given[x]) for x in ("query", "key", "value"))
        mask = given.get("attn_mask")
        self.attends.append(Attend(q, k, v, None if mask is None else self._node(mask), self.order))

    def _attends_by(self, scores: Node) -> None:
        """Find the product of queries and keys that scores were made from."""
        product = next((x for x in _same_shape(scores) if x.name in _PRODUCTS), None)
        letters = None if product is None else _letters(product)
        self.attends.append(None)
        if product is None or letters is None or len(letters[2]) < 2:
            return
        *given, out = letters
        operands = list(zip(product.inputs, given, strict=True))
        operands.sort(key=lambda x: out[-1] in x[1])  # An equation may name keys first.
        queries, keys = (_by_rows(*x, out, row) for x, row in zip(operands, out[-2:], strict=True))
        if queries is not None and keys is not None:
            self.attends[-1] = Attend(queries, keys, None, None, self.order)

    def _takes_values(self, product: Node) -> None:
        """Find values and result of attention that is written out, in the product with its weights."""
        if (letters := _letters(product)) is None:
            return
        inputs = product.inputs
        for i in (0, 1):
            call = next((self.weights[x] for x in _same_shape(inputs[i]) if x in self.weights), None)
            if call is not None and call.value is None:
                call.value = _by_rows(inputs[1 - i], letters[1 - i], letters[i], letters[i][-1])
                call.result = _by_rows(product, letters[2], letters[i], letters[i][-2])


def _same_shape(node: Node | None) -> Iterator[Node]:
    """Yield a node and those that it was made from, while they have its shape."""
    while node is not None:
        yield node
        node = next((x for x in node.inputs if x.value.shape == node.value.shape), None)


def _letters(product: Node) -> tuple[str, str, str] | None:
    """Name the dims of the operands and of the result of a product. None for other equations."""
    dims = [x.value.dim() for x in (*product.inputs, product)]
    equation = product.equation if product.name == "einsum" else "...ij,...jk->...ik"
    given, _, out = equation.replace(" ", "").partition("->")
    parts = [*given.split(","), out]
    if len(parts) != 3 or len(dims) != 3 or not out:
        return None
    left = [n - len(x.replace("...", "")) for x, n in zip(parts, dims, strict=True)]
    if any(n < 0 or (n and "..." not in x) for x, n in zip(parts, left, strict=True)):
        return None
    a, b, c = (x.replace("...", _LETTERS[len(_LETTERS) - n :]) for x, n in zip(parts, left, strict=True))
    return a, b, c


def _by_rows(node: Node, letters: str, other: str, row: str) -> Node | None:
    """Bring an operand of a product to (..., row, D), with leading dims as the other tensor has them."""
    order = [*(x for x in other if x != row), row, *(x for x in letters if x not in other)]
    dims = [letters.index(x) for x in order if x in letters]
    if row not in letters or sorted(dims) != list(range(len(letters))):
        return None
    moved = node.value.permute(dims)
    return node if dims == sorted(dims) else Node("permute", node.lines, moved, (node,), node.order)


def _lines() -> tuple[Place, ...]:
    return tuple(lines_of(sys._getframe(1)))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


def apart(x: Tensor, y: Tensor, at: tuple[int, int], sizes: tuple[int, int]) -> bool | None:
    """Whether a token's entries differ in two tensors. None if they cannot be compared.

    Args:
        x, y: Results of the same function in two runs with another number of tokens.
        at: Number of the token in each run.
        sizes: Number of tokens in each run.
    """
    if x.dim() != y.dim() or x.dtype != y.dtype:
        return None
    dims = [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
    if len(dims) > 1:
        return None
    for dim in dims:
        a, b = x.shape[dim], y.shape[dim]
        if a % sizes[0] or b % sizes[1] or a // sizes[0] != b // sizes[1]:
            return None  # The dim is neither the tokens nor the tokens of all samples.
        x, y = (
            z.reshape(*z.shape[:dim], -1, n, *z.shape[dim + 1 :]).select(dim + 1, i)
            for z, n, i in zip((x, y), sizes, at, strict=True)
        )
    if x.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y.resolve_conj())
    if not x.is_floating_point():
        return not torch.equal(x, y)
    return bool((x - y).abs().nan_to_num().max() > 1e-4 * y.abs().nan_to_num().max()) if x.numel() else False


def origin(one: Node, other: Node, at: tuple[int, int], sizes: tuple[int, int]) -> tuple[Node, Node]:
    """Find the first function whose result for a token differs in two runs, behind equal inputs, in both."""
    while one.name == other.name:
        pairs = list(zip(one.inputs, other.inputs, strict=False))
        found = next((x for x in pairs if apart(x[0].value, x[1].value, at, sizes)), None)
        if found is None:
            break
        one, other = found
    return one, other


def cache_of(node: Node, start: int) -> Node | None:
    """Find the function that joins entries of an earlier step and of this step, from an operand backwards.

    Args:
        node: The operand.
        start: Order of the last function of the earlier step.
    """
    return next((x for x in backwards(node, start) if x.is_join and _joins(x, start)), None)


def backwards(node: Node, start: int, until: Collection[str] = ()) -> Iterator[Node]:
    """Yield a node and the nodes that it was made from, made behind a function of this order.

    Args:
        node: The node.
        start: Order of the last function that is left out.
        until: Names of functions that are left out, with the nodes before them.
    """
    todo, seen = [node], set[Node]()
    while todo:
        node = todo.pop(0)
        if node not in seen and node.order > start and node.name not in until:
            seen.add(node)
            yield node
            todo += node.inputs


def _joins(node: Node, start: int) -> bool:
    if node.name == _WRITE:
        first = node.inputs[0]
        while first.order > start and len(first.inputs) == 1:
            first = first.inputs[0]
        return first.order <= start
    ages = {_age(x, start, {}) for x in node.inputs}
    return {"old", "new"} <= ages


def _age(node: Node, start: int, known: dict[Node, str]) -> str:
    """Say whether a tensor comes from an earlier step ("old"), from this step ("new"), or is a "constant"."""
    if node.order <= start:
        # The doctor copies the batch at the start of a run. Integers are tokens and positions.
        is_old = node.name not in ("", "clone") and node.value.is_floating_point()
        return "old" if is_old else "constant"
    if node not in known:
        known[node] = "new"
        ages = {_age(x, start, known) for x in node.inputs}
        known[node] = "old" if "old" in ages and "new" not in ages else "new"
    return known[node]
