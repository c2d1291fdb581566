"""Masks in words, for back ends that have kernels for a few of them."""

from __future__ import annotations

from ..call import Problem
from ..masks import Mask, causal, full, window
from ._contract import MaskWords


def words_of(mask: object, problem: Problem, default_indices: bool) -> MaskWords | None:
    """The mask in words; None where only its bounds say what it is.

    Args:
        mask: As `attention` takes it.
        problem: The call.
        default_indices: Rows and keys have the indices that they have by default.

    Example:
        >>> from attnspan import causal, window
        >>> words_of(causal() & window(4), Problem(1, 1, 1, 8, 8, 64, 64, 1, "bfloat16", "gpu"), True)
        ('window', 4, 0)
    """
    if not isinstance(mask, Mask) or not default_indices:
        return None
    leaves = list(mask._leaves())
    if all(isinstance(leaf, full) for leaf in leaves):
        return ("full",)
    # Other libraries align the first query with the first key, we the last ones.
    joined = repr(mask).count(" | ") == 0 and all(isinstance(x, causal | full | window) for x in leaves)
    if problem.q_len != problem.k_len or not joined:
        return None
    left = [x.left for x in leaves if isinstance(x, window) and x.left is not None]
    right = [x.right for x in leaves if isinstance(x, window) and x.right is not None]
    right += [0 for x in leaves if isinstance(x, causal)]
    if not left and right == [0]:
        return ("causal",)
    return ("window", min(left, default=None), min(right, default=None))
