"""Trials: the tokens of some documents or positions change, and results of other tokens must not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnspan_lab.doctor.jax.subject import JaxSubject, Traced, floats
from attnspan_lab.doctor.jax.values import Value
from attnspan_lab.doctor.jax.watch import Attention, Watcher, watched
from attnspan_lab.doctor.pairs import changes

__all__ = ["Trial", "relative_change"]

_WITHIN = 1e-4  # relative change of a row of results that counts
_MOST_GROUPS = 8


@dataclass(frozen=True)
class Trial:
    """A step whose tokens can be changed.

    Attributes:
        subject, batch, traced: The subject and its traced step.
        calls: Attention calls of the watched step, if it was watched.
        run: Replaces the step on one device: from leaves to results.
        emptied: Queries (B, Sq) whose results are 0 in all runs, by the number of the call.
    """

    subject: JaxSubject
    batch: Any
    traced: Traced
    calls: tuple[Attention, ...] = ()
    run: Callable[..., Any] | None = None
    emptied: Mapping[int, np.ndarray] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """Number of batch elements and tokens."""
        return self.subject.size(self.batch) or (1, 1)

    def changed(self, groups: np.ndarray, only: int | None) -> str | None:
        """Change the tokens of one group after the other, and describe the results of others that change.

        Args:
            groups: The group of each token, (B, S).
            only: The group to change, or None for every group.

        Returns:
            A sentence, "" if no foreign result changes, or None if there are no results (B, S, ...).
        """
        rows = _Rows(self, groups.shape)
        before = rows.of(self.traced.leaves)
        if not before or not self.subject.tokens(self.batch):
            return None
        count, most = 0, 0.0
        for own in self._groups(groups, only):
            pairs = zip(before, rows.of(self.leaves(own)), strict=True)
            change = np.max([relative_change(x, y) for x, y in pairs], axis=0)
            change = np.where((own | self.padding(groups.shape[1]))[:, : change.shape[1]], 0, change)
            count, most = count + int((change > _WITHIN).sum()), max(most, float(change.max()))
        return changes(count, most, rows.of_what) if count else ""

    def padding(self, length: int) -> np.ndarray:
        """Tokens (B, length) that see no key and are seen by no query. Their results may be anything.

        A token that the batch marks as valid is no padding, whatever the mask of a call does.
        """
        padding = np.zeros((self.size[0], length), bool)
        for x in (x.padding for x in self.calls if x.padding is not None):
            if len(x) in (1, len(padding)) and length - 1 <= x.shape[1] <= length:
                padding[:, : x.shape[1]] |= x
        valid = self.subject.stated(self.batch, length)
        return padding if valid is None else padding & ~valid

    def decides(self, groups: np.ndarray, only: int | None) -> str:
        """Say whether the step compares the values of tokens, as for a mask tokens != 0.

        Changed tokens then change the mask, so that changed results are no proof.
        """
        own = np.ones_like(groups, bool) if only is None else groups == only
        leaves = (self.traced.leaves, self.leaves(own))
        before, after = (self.watched(x)[0].decisions for x in leaves)
        if len(before) == len(after) and all(map(np.array_equal, before, after)):
            return ""
        return "not confirmed: the step compares values of tokens, and the changed tokens may change a mask"

    def _groups(self, groups: np.ndarray, only: int | None) -> list[np.ndarray]:
        chosen = [only] if only is not None else list(np.unique(groups)[:_MOST_GROUPS])
        return [groups == x for x in chosen]

    def leaves(self, own: np.ndarray, names: Collection[str] = ()) -> list[Any]:
        """Change the tokens where ``own`` is True, or entries of the sequences with these names."""
        named, leaves = self.subject.named(self.batch), self.traced.leaves
        chosen = {id(named[x]) for x in names or self.subject.tokens(self.batch)}
        fits = [i >= self.traced.variables and id(x) in chosen for i, x in enumerate(leaves)]
        return [_other(x, own) if fit else x for fit, x in zip(fits, leaves, strict=True)]

    def beside(self, leaves: list[Any]) -> list[tuple[Attention, Attention]]:
        """Pair the calls with the calls of the step with other arguments. Empty if these are other calls."""
        other = self.watched(leaves)[0].calls
        return [*zip(self.calls, other, strict=True)] if len(self.calls) == len(other) else []

    def watched(self, leaves: list[Any]) -> tuple[Watcher, list[Value]]:
        """Watch the step with other arguments."""
        return watched(replace(self.traced, leaves=leaves), self.size, self.emptied)

    def results(self, leaves: list[Any]) -> list[Any]:
        """Run the step, and list its floating-point results."""
        if self.emptied:
            return floats([x.array for x in self.watched(leaves)[1]])
        return floats((self.run or self.traced.trial)(*leaves))


class _Rows:
    """The results of each token: of the step, or of its attention calls if the step returns only a loss."""

    def __init__(self, trial: Trial, size: tuple[int, ...]) -> None:
        self.trial, self.size, self.of_what = trial, size, "results"

    def of(self, leaves: list[Any]) -> list[np.ndarray]:
        """List arrays (B, S, D). A loss for each token, (B, S), also depends on the next token."""
        rows, length = self.size
        found = [x for x in self.trial.results(leaves) if np.ndim(x) > 2]
        found = [x for x in found if np.shape(x)[:2] in ((rows, length), (rows, length - 1))]
        if not found:
            self.of_what = "attention's results"
            calls = self.trial.watched(leaves)[0].calls
            found = [np.moveaxis(x.out.rows, -1, 1) for x in calls if x.out is not None]
        longest = max((x.shape[1] for x in found if x.shape[0] == rows and x.shape[1] <= length), default=0)
        wide = [np.asarray(x, np.float64) for x in found if x.shape[:2] == (rows, longest)]
        return [x.reshape(rows, longest, -1) for x in wide] if longest >= length - 1 else []


def relative_change(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Relative change of each row."""
    scale = np.linalg.norm(before, axis=-1) + 1e-3 * np.abs(before).max() + 1e-30
    return np.asarray(np.linalg.norm(after - before, axis=-1) / scale)


def _other(tokens: Any, own: np.ndarray) -> Any:
    """Replace tokens by other tokens of the batch, or move floating-point ones."""
    x = np.asarray(tokens)
    if x.dtype.kind in "iu":
        known = np.unique(x)
        other = (
            known[(np.searchsorted(known, x) + 1) % len(known)] if len(known) > 1 else np.where(x == 0, 1, 0)
        )
        return np.where(own, other, x).astype(x.dtype)
    other = (0.5 - x.astype(np.float64)).astype(x.dtype)
    return np.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), other, x)
