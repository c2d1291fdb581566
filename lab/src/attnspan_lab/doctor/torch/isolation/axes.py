"""Axes of attention: heads and tokens that are mixed up, found by following one token into the operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, noise, sdpa

__all__ = ["Axes", "source_of"]


_FOLLOWED = "a changed token was followed through each call, to see if heads and tokens are mixed up there"


@dataclass
class Axes:
    """Checks the first call of each line, once for all batches.

    Attributes:
        done: Lines that were checked.
    """

    done: set[Place] = field(default_factory=set)

    def findings(self, step: Step, coverage: Coverage) -> Iterator[Finding]:
        """Yield calls whose heads and tokens are mixed up, before the call or behind it."""
        for call in step.calls:
            if call.place is None or call.place in self.done:
                continue
            self.done.add(call.place)
            source = source_of(step, call)
            if source is None or step.inputs[source].shape[1] < 2:
                coverage.absent("axes", f"no module around {call.place} receives several tokens (B, S, C)")
                continue
            follow = _Follow(step, call, source)
            coverage.made("axes", _FOLLOWED)
            _regrouped(step, call, source, coverage)
            if follow.is_swapped():
                yield follow.swapped()
            elif follow.is_split():
                yield follow.split()
            elif follow.is_merged():
                yield follow.merged()
            yield from _one_head(step, call, source)


def _regrouped(step: Step, call: Call, source: str, coverage: Coverage) -> None:
    """Note a call whose module receives other sequences than the samples of the batch."""
    shape, rows = step.inputs[source].shape, step.subject.rows(step.batch)
    if rows not in shape[:2] and shape[0] > 1:
        why = (
            f"the module at {call.place} attends within {shape[0]} sequences of {shape[1]} tokens, made from "
        )
        why += f"{rows} samples. The doctor did not examine which tokens share a sequence"
        coverage.missed("grouping of tokens", why)


def source_of(step: Step, call: Call) -> str | None:
    """Name the innermost running module that receives tokens (B, S, C)."""
    return next((x for x in reversed(call.modules) if x in step.inputs), None)


class _Follow:
    """Follows a token from the input of a module into a call, and from its result to the next module."""

    def __init__(self, step: Step, call: Call, source: str) -> None:
        self.step, self.call, self.source = step, call, source
        self.batch, self.length = step.inputs[source].shape[:2]
        self.tokens = (self.length // 2, self.length - 1)

    def _into(self, token: int) -> dict[str, Tensor] | None:
        """Find the rows of operands that a token changes, bool (X, Y), or None for an unknown layout."""
        found = {}
        again = self.step.again(inject=(self.source, lambda x: self._changed(x, token)))
        if len(again.calls) != len(self.step.calls):
            return None
        other = again.calls[self.call.number]
        for name in ("query", "key", "value") if self.call.is_torchs else ("scores",):
            a, b = self._grouped(self.call.given[name]), self._grouped(other.given[name])
            if a is None or b is None or a.shape != b.shape:
                return None
            found[name] = (a != b).any(-1).any(0)
        return found

    def _changed(self, x: Tensor, token: int) -> Tensor:
        if x.shape[:2] != (self.batch, self.length):
            return x
        x, more = x.clone(), noise(x[:, token])
        x[:, token] += more
        return x

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Bring an operand to (B, X, Y, D). A first dim may hold batch and heads."""
        if x.dim() == 3 and x.shape[0] % self.batch == 0:
            x = x.reshape(self.batch, -1, *x.shape[1:])
        return x if x.dim() == 4 and x.shape[0] == self.batch else None

    def is_swapped(self) -> bool:
        """Whether dim 1 holds the tokens, so that each token's heads attend to each other."""
        rows = self._grouped(self.call.rows)
        if rows is None or rows.shape[1] != self.length or rows.shape[2] < 2:
            return False

        def fits(x: Tensor, token: int) -> bool:
            return bool(x[token].all()) and int(x.sum()) == x.shape[1] and x.shape[1] == rows.shape[2]

        return all(
            (found := self._into(t)) is not None and all(fits(x, t) for x in found.values())
            for t in self.tokens
        )

    def is_split(self) -> bool:
        """Whether (B, S, H * D) was viewed as (B, H, S, D): a token then lands in neighbouring queries."""
        return self.call.is_torchs and all(self._is_split(t) for t in self.tokens)

    def _is_split(self, token: int) -> bool:
        found = self._into(token)
        if found is None:
            return False
        for x in found.values():
            heads = x.shape[0]
            wanted = list(range(token * heads, (token + 1) * heads))
            if heads < 2 or x.shape[1] != self.length or x.flatten().nonzero().flatten().tolist() != wanted:
                return False
        return True

    def is_merged(self) -> bool:
        """Whether a result (B, H, S, D) was viewed as (B, S, H * D): a query then lands in other tokens."""
        rows = self._grouped(self.call.rows)
        if rows is None or rows.shape[1] < 2 or rows.shape[2] != self.length:
            return False
        if not self.call.is_torchs and rows.shape[3] != self.length:
            return False
        heads = rows.shape[1]
        wanted = [{(h * self.length + n) // heads for h in range(heads)} for n in self.tokens]
        found = [self._out_of(n) for n in self.tokens]
        return found == wanted and any(x != {n} for x, n in zip(found, self.tokens, strict=True))

    def _out_of(self, query: int, *, regrouped: bool = False) -> set[int] | None:
        """Find the tokens that a query's result changes in the input of the next module."""

        def change(call: Call) -> Tensor | None:
            if call.number != self.call.number:
                return None
            out = call.result.clone()
            out[..., query, :] *= 0.5
            return self._merged_anew(out) if regrouped else out

        def keep(call: Call) -> Tensor | None:
            return self._merged_anew(call.result) if call.number == self.call.number else None

        before = self.step.again(replace=keep) if regrouped else self.step
        a, b = (x.calls[self.call.number].after for x in (before, self.step.again(replace=change)))
        if a is None or b is None or a.shape != b.shape or a.shape[:2] != (self.batch, self.length):
            return None
        return set((a != b).any(-1).any(0).nonzero().flatten().tolist())

    @staticmethod
    def _merged_anew(out: Tensor) -> Tensor:
        """Reorder a result (B, H, S, D) so that a plain reshape to (B, S, H * D) merges heads rightly."""
        return out.transpose(-3, -2).reshape(out.shape)

    def swapped(self) -> Finding:
        """Write the finding for swapped heads and tokens, and try to transpose them."""
        heads, token = self._shape()[2], self.tokens[0]
        dim = "dim 1" if self.call.rows.dim() == 4 else "dim 0"
        what = "Attention mixes the heads of each token here, and no two tokens"
        evidence = (
            f"q has shape {tuple(self.call.rows.shape)}: changing token {token} changes only index {token} "
            f"of {dim}, in all {heads} rows that attend to each other"
            if self.call.is_torchs
            else f"changing token {token} changes only index {token} of {dim} of the scores"
        )
        tried = self._transposed()
        remedy = (
            "Call it with q, k and v of shape (B, heads, S, head dim): q.transpose(1, 2), k.transpose(1, 2), "
            "v.transpose(1, 2), and transpose the result back with .transpose(1, 2)"
        )
        return Finding(
            "token-axis", what, at(self.call.place), (evidence,), remedy=remedy if tried else "", tried=tried
        )

    def _transposed(self) -> str:
        """Transpose the operands, change the first token, and describe the outcome."""
        place = self.call.place

        def turned(call: Call) -> Tensor | None:
            if call.place != place or not call.is_torchs:
                return None
            given = {
                k: x.transpose(1, 2) if k in ("query", "key", "value") else x for k, x in call.given.items()
            }
            return _called(given).transpose(1, 2)

        if not self.call.is_torchs or self.call.rows.dim() != 4:
            return ""
        first = (self.source, lambda x: self._changed(x, 0))
        try:
            a, b = self.step.again(replace=turned), self.step.again(replace=turned, inject=first)
        except (CannotRun, RuntimeError):  # The mask does not fit, for example.
            return ""
        one, other = (x.calls[self.call.number].result for x in (a, b))
        reached = int((one != other).flatten(2).any(-1).any(0)[1:].sum())
        said = f"transposed, a change of token 0 changes the results of {reached} other tokens in this call"
        return said if reached else ""

    def _shape(self) -> tuple[int, ...]:
        rows = self._grouped(self.call.rows)
        return tuple(rows.shape) if rows is not None else ()

    def split(self) -> Finding:
        """Write the finding for heads that were split by a view without a transposition."""
        heads, token = self._shape()[1], self.tokens[0]
        what = "Queries mix heads and tokens here: one token's heads are queries of different positions"
        rows = [divmod(x, self.length) for x in range(token * heads, (token + 1) * heads)]
        evidence = (
            f"q has shape {tuple(self.call.rows.shape)}: changing token {token} changes (head, query) "
            f"{', '.join(map(str, rows[:4]))}{', ...' if len(rows) > 4 else ''}"
        )
        cause = (
            "A tensor (B, S, heads * head dim) was viewed as (B, heads, S, head dim), which is another order"
        )
        remedy = "Split heads with x.view(B, S, heads, -1).transpose(1, 2)"
        if self._out_of(token) != {token}:
            remedy += ", and merge them with out.transpose(1, 2).flatten(2)"
        # Another split only reorders the rows of q.
        rows_of = (self._into(token) or {})["query"].reshape(self.length, heads)
        alone = rows_of.any(1).nonzero().flatten().tolist() == [token]
        tried = f"split so, changing token {token} changes query {token} of each head alone" if alone else ""
        return Finding("token-axis", what, at(self.call.place), (evidence,), cause, remedy, tried)

    def merged(self) -> Finding:
        """Write the finding for heads that were merged without transposing back, and try it."""
        query = self.tokens[0]
        what = "The heads of this call's result are merged in the wrong order, which mixes tokens"
        reached = sorted(self._out_of(query) or ())
        shown = f"{', '.join(map(str, reached[:6]))}{', ...' if len(reached) > 6 else ''}"
        evidence = f"changing the result of query {query} changes the tokens {shown} behind it"
        cause = (
            "A result (B, heads, S, head dim) was viewed as (B, S, heads * head dim), which is another order"
        )
        remedy, tried = "Merge heads with out.transpose(1, 2).flatten(2)", ""
        if self.call.is_torchs and self._out_of(query, regrouped=True) == {query}:
            tried = f"transposed back first, the result of query {query} changes token {query} alone"
        return Finding("token-axis", what, at(self.call.place), (evidence,), cause, remedy, tried)


def _called(given: dict[str, object]) -> Tensor:
    return sdpa(**given)  # type: ignore[arg-type]


_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "nheads")


def _one_head(step: Step, call: Call, source: str) -> Iterator[Finding]:
    """Yield a call with one head as wide as the model, in a module that says it has several heads."""
    if not call.is_torchs or call.rows.dim() not in (3, 4):
        return
    batch, length, width = step.inputs[source].shape
    module = dict(step.subject.model.named_modules())[call.modules[-1]]
    heads = next((x for k in _HEADS if isinstance(x := getattr(module, k, None), int)), 1)
    one = call.rows.shape in ((batch, length, width), (batch, 1, length, width))
    if not one or heads < 2 or width % heads:
        return
    what = f"This call has one head of {width} dims, and its module says that it has {heads} heads"
    evidence = f"q has shape {tuple(call.rows.shape)}"
    yield Finding("one-head", what, at(call.place), (evidence,))
