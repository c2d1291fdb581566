"""Pairs of tokens that must not be visible, and padding of other sequences: texts for torch and JAX."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan_lab.doctor.words import counted

__all__ = ["MIXED", "OUTSIDE", "SAME", "SEEN", "TOPICS", "PaddingOf", "changes", "unproven", "visible"]

#: The problem, by the kind of the finding.
SEEN = {
    "leak": "Packed documents see each other here",
    "mask-lost": "Valid tokens see padding here",
    "causality-lost": "Tokens see later ones here, in a model that predicts the next token",
}
#: The check, by the kind of the finding.
TOPICS = {"leak": "documents", "mask-lost": "padding", "causality-lost": "causality"}
#: The cause if no attention call shows the pairs.
MIXED = "Another part of the model mixes tokens"
#: Remedies for layers that mix tokens outside of attention.
OUTSIDE = {
    "leak": "Let layers that mix tokens, such as a convolution or a token shift, stop at document borders",
    "causality-lost": "Look in this function for operators along the tokens, such as topk, sort, mean or a "
    "convolution. Let them use earlier tokens only, and pad a convolution on the left",
    "mask-lost": "Set padding to 0 before layers that mix tokens, such as a convolution or a token shift",
}
#: Relative change of results that counts as none, if only padding of another sequence changes.
SAME = 1e-6


def visible(pairs: int) -> str:
    """Write how many pairs are visible and must not be."""
    return f"{pairs} visible pairs of tokens that must not see each other"


def changes(rows: int, most: float, of: str = "results") -> str:
    """Write what changed tokens change."""
    changed = f"{counted(rows, 'row')} of {of} of others by up to {most:.1e} (relative error)"
    return f"changing these tokens changes {changed}"


def unproven(why: str) -> str:
    """Write that changed tokens confirm nothing."""
    return f"not confirmed by changing tokens: {why}"


@dataclass(frozen=True)
class PaddingOf:
    """Padding of a sequence of the batch, such as the states of an encoder.

    Args:
        name: The sequence.
        mask: The argument that marks the padding.
        count: Number of padded entries.
    """

    name: str
    mask: str
    count: int

    @property
    def topic(self) -> str:
        """Name of the check."""
        return f"padding of {self.name}"

    @property
    def seen(self) -> str:
        """The problem, in a sentence."""
        return f"Queries see the {self.topic} here"

    @property
    def unchanged(self) -> str:
        """The result of the check if nothing is wrong."""
        return f"read from {self.mask}: changed padding changes no result"

    def changed(self, change: float) -> str:
        """Write by how much results change."""
        return f"changed padding ({self.mask}) changes results by {change:.1e}"

    def evidence(self, change: float) -> tuple[str, str]:
        """Write the evidence of a call that shows the padding."""
        return (
            f"changing padded entries of {self.name} changes results by {change:.1e} (relative error)",
            f"{self.name} has {self.count} padded entries, and queries see them here",
        )
