"""Axes of attention: heads and tokens that are mixed up, found by following one token into the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.masks.hiding_values import highest_hiding
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, sdpa
from attnspan_lab.doctor.torch.recording.changes import stirred
from attnspan_lab.doctor.words import listed

__all__ = ["axis_findings", "source_of"]

_Texts = tuple[str, str, str, str, str]  # what, evidence, cause, remedy and trial
_MOST = 0.9  # In bfloat16, some scores of a changed query are rounded to the same numbers.
_FOLLOWED = "a changed token was followed through each call, to see if heads and tokens are mixed up there"


def axis_findings(step: Step, coverage: Coverage, checked: set[Place]) -> Iterator[Finding]:
    """Yield calls whose heads and tokens are mixed up, before the call or behind it.

    Args:
        step: The step.
        coverage: Collects the checks.
        checked: Lines that were checked: the first call of each line is checked, once for all batches.
    """
    for call in step.calls:
        if call.place is None or call.place in checked:
            continue
        checked.add(call.place)
        source = source_of(step, call)
        if source is None or step.inputs[source].shape[1] < 2:
            coverage.absent("axes", f"no module around {call.place} receives several tokens (B, S, C)")
            continue
        follow = _Follow(step, call, source)
        if follow.is_readable:
            coverage.made("axes", _FOLLOWED)
        else:
            why = f"at {call.place}, {follow.shape}, and the module around it receives {follow.length} tokens"
            coverage.missed("axes", f"{why}. The doctor does not know this layout")
        _regrouped(step, call, source, coverage)
        found = follow.finding(), _one_head(step, call, source)
        yield from (x for x in found if x is not None)


def _regrouped(step: Step, call: Call, source: str, coverage: Coverage) -> None:
    """Note a call whose module receives other sequences than the samples of the batch."""
    (many, length, _), rows = step.inputs[source].shape, step.subject.rows(step.batch)
    if rows not in (many, length) and many > 1:
        why = f"the module at {call.place} attends within {many} sequences of {length} tokens"
        why += f", made from {rows} samples. The doctor did not examine which tokens share a sequence"
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
        rows = self._grouped(call.rows)
        self.sizes = (0, 0, 0, 0) if rows is None else tuple(rows.shape)
        self.shape = f"{'q has' if call.is_torchs else 'scores have'} shape {tuple(call.rows.shape)}"
        # A softmax over another dim has its keys there.
        over_keys = call.is_torchs or call.given["dim"] in (-1, call.rows.dim() - 1)
        self.is_readable = over_keys and self.length in self.sizes[1:3]

    def finding(self) -> Finding | None:
        """Write the finding if heads and tokens are mixed up."""
        if self._is_swapped():
            what, evidence, cause, remedy, tried = self._swapped()
        elif self._is_split():
            what, evidence, cause, remedy, tried = self._split()
        elif self._is_merged():
            what, evidence, cause, remedy, tried = self._merged()
        else:
            return None
        return Finding("token-axis", what, at(self.call.place), (evidence,), cause, remedy, tried)

    def _into(self, token: int) -> list[Tensor]:
        """Find the rows of q, k and v that a token changes, bool (X, Y). Empty for an unknown layout.

        A query changes the scores of its row that no mask hides, and a key such scores of its column.
        """
        changed = stirred((self.batch, self.length), (slice(None), token))
        again = self.step.again(inject=(self.source, changed))
        found = []
        if len(again.calls) == len(self.step.calls):
            other = again.calls[self.call.number]
            for name in self.call.operands:
                a, b = self._grouped(self.call.given[name]), self._grouped(other.given[name])
                if a is None or b is None or a.shape != b.shape:
                    return []
                differs = a != b
                if self.call.is_torchs:
                    found.append(differs.any(-1).any(0))
                    continue
                shown = a > highest_hiding(a)
                many = ((differs & shown).sum(d) / shown.sum(d) for d in (-1, -2))
                found += [(x >= _MOST).any(0) for x in many]
        return found

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Bring an operand to (B, X, Y, D). A first dim may hold batch and heads."""
        if x.dim() == 3 and x.shape[0] % self.batch == 0:
            x = x.reshape(self.batch, -1, *x.shape[1:])
        return x if x.dim() == 4 and x.shape[0] == self.batch else None

    def _lands(self, fits: Callable[[Tensor, int], bool]) -> bool:
        """Whether each of the tokens changes rows of all operands that fit it."""
        return all((found := self._into(t)) and all(fits(x, t) for x in found) for t in self.tokens)

    def _is_swapped(self) -> bool:
        """Whether dim 1 holds the tokens, so that each token's heads attend to each other."""
        _, length, heads, _ = self.sizes

        def fits(x: Tensor, token: int) -> bool:
            return bool(x[token].all()) and int(x.sum()) == x.shape[1] == heads

        return length == self.length and heads > 1 and self._lands(fits)

    def _is_split(self) -> bool:
        """Whether (B, S, H * D) was viewed as (B, H, S, D): a token then lands in neighbouring queries."""

        def fits(x: Tensor, token: int) -> bool:
            heads, length = x.shape
            wanted = list(range(token * heads, (token + 1) * heads))
            return heads > 1 and length == self.length and x.flatten().nonzero().flatten().tolist() == wanted

        return self.is_readable and self._lands(fits)

    def _is_merged(self) -> bool:
        """Whether a result (B, H, S, D) was viewed as (B, S, H * D): a query then lands in other tokens."""
        _, heads, length, last = self.sizes
        if heads < 2 or length != self.length or not (self.call.is_torchs or last == self.length):
            return False
        wanted = [{(h * self.length + n) // heads for h in range(heads)} for n in self.tokens]
        return wanted == [self._out_of(n) for n in self.tokens] != [{n} for n in self.tokens]

    def _out_of(self, query: int, *, regrouped: bool = False) -> set[int] | None:
        """Find the tokens that a query's result changes in the input of the next module."""

        def change(call: Call, factor: float) -> Tensor | None:
            if call.number != self.call.number:
                return None
            out = call.result.clone()
            out[..., query, :] *= factor
            # In another order, a plain reshape to (B, S, H * D) merges heads rightly.
            return out.transpose(-3, -2).reshape(out.shape) if regrouped else out

        before = self.step.again(replace=partial(change, factor=1.0)) if regrouped else self.step
        other = self.step.again(replace=partial(change, factor=0.5))
        a, b = (x.calls[self.call.number].after for x in (before, other))
        if a is None or b is None or a.shape != b.shape or a.shape[:2] != (self.batch, self.length):
            return None
        return set((a != b).any(-1).any(0).nonzero().flatten().tolist())

    def _swapped(self) -> _Texts:
        """Write about swapped heads and tokens, and try to transpose them."""
        heads, token = self.sizes[2], self.tokens[0]
        dim = "dim 1" if self.call.rows.dim() == 4 else "dim 0"
        what = "Attention mixes the heads of each token here, and no two tokens"
        evidence = f"changing token {token} changes only index {token} of {dim}"
        evidence = (
            f"{self.shape}: {evidence}, in all {heads} rows that attend to each other"
            if self.call.is_torchs
            else f"{evidence} of the scores"
        )
        remedy = (
            "Call it with q, k and v of shape (B, heads, S, head dim): q.transpose(1, 2), k.transpose(1, 2), "
            "v.transpose(1, 2), and transpose the result back with .transpose(1, 2)"
        )
        tried = self._transposed()
        return what, evidence, "", remedy if tried else "", tried

    def _transposed(self) -> str:
        """Transpose the operands, change the first token, and describe the outcome."""

        def turned(call: Call) -> Tensor | None:
            if call.place != self.call.place or not call.is_torchs:
                return None
            operands = {x: call.given[x].transpose(1, 2) for x in call.operands}
            return sdpa(**{**call.given, **operands}).transpose(1, 2)

        if not self.call.is_torchs or self.call.rows.dim() != 4:
            return ""
        first = self.source, stirred((self.batch, self.length), (slice(None), 0))
        try:
            a, b = self.step.again(replace=turned), self.step.again(replace=turned, inject=first)
        except CannotRun:  # The mask does not fit, for example.
            return ""
        one, other = (x.calls[self.call.number].result for x in (a, b))
        reached = int((one != other).flatten(2).any(-1).any(0)[1:].sum())
        said = f"transposed, a change of token 0 changes the results of {reached} other tokens in this call"
        return said if reached else ""

    def _split(self) -> _Texts:
        """Write about heads that were split by a view without a transposition."""
        heads, token = self.sizes[1], self.tokens[0]
        what = "Queries mix heads and tokens here: one token's heads are queries of different positions"
        rows = [divmod(x, self.length) for x in range(token * heads, (token + 1) * heads)]
        evidence = f"{self.shape}: changing token {token} changes (head, query) {listed(rows, 4)}"
        cause = (
            "A tensor (B, S, heads * head dim) was viewed as (B, heads, S, head dim), which is another order"
        )
        remedy = "Split heads with x.view(B, S, heads, -1).transpose(1, 2)"
        if self._out_of(token) != {token}:
            remedy += ", and merge them with out.transpose(1, 2).flatten(2)"
        # Another split only reorders the rows of q.
        changed = self._into(token)[0].reshape(self.length, heads).any(1)
        tried = f"split so, changing token {token} changes query {token} of each head alone"
        return what, evidence, cause, remedy, tried if changed.nonzero().flatten().tolist() == [token] else ""

    def _merged(self) -> _Texts:
        """Write about heads that were merged without transposing back, and try it."""
        query = self.tokens[0]
        what = "The heads of this call's result are merged in the wrong order, which mixes tokens"
        reached = listed(sorted(self._out_of(query) or ()), 6)
        evidence = f"changing the result of query {query} changes the tokens {reached} behind it"
        cause = (
            "A result (B, heads, S, head dim) was viewed as (B, S, heads * head dim), which is another order"
        )
        remedy, tried = "Merge heads with out.transpose(1, 2).flatten(2)", ""
        if self.call.is_torchs and self._out_of(query, regrouped=True) == {query}:
            tried = f"transposed back first, the result of query {query} changes token {query} alone"
        return what, evidence, cause, remedy, tried


_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "nheads")


def _one_head(step: Step, call: Call, source: str) -> Finding | None:
    """Write the finding for one head as wide as the model, in a module that says it has several heads."""
    if not call.is_torchs or call.rows.dim() not in (3, 4):
        return None
    batch, length, width = step.inputs[source].shape
    module = dict(step.subject.model.named_modules())[call.modules[-1]]
    heads = next((x for k in _HEADS if isinstance(x := getattr(module, k, None), int)), 1)
    one = call.rows.shape in ((batch, length, width), (batch, 1, length, width))
    if not one or heads < 2 or width % heads:
        return None
    what = f"This call has one head of {width} dims, and its module says that it has {heads} heads"
    evidence = f"q has shape {tuple(call.rows.shape)}"
    return Finding("one-head", what, at(call.place), (evidence,))
