"""Causes and remedies of tokens that other layers than attention mix, by the operator that mixes them."""

from __future__ import annotations

from attnspan_lab.doctor.pairs import MIXED, OUTSIDE
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.isolation.declared import real_tokens

__all__ = ["LOCAL", "OF_LENGTH", "cause_of_mixing", "of_call", "of_operator", "remedy_of_mixing"]

#: Operators whose results some models let padding change on purpose.
LOCAL = ("convolution", "native_group_norm")
_REDUCED = ("mean", "sum", "amax", "amin", "max", "min", "std", "var", "var_mean", "linalg_vector_norm")
# Remedies if tokens must not see later ones.
_OF_EARLIER = {
    "topk": "Choose for each token alone: topk over the experts (dim=-1), not over the tokens",
    "sort": "Sort within each token, not over the tokens",
    **dict.fromkeys(
        _REDUCED, "Reduce over the channels (dim=-1), or over earlier tokens, and not over the tokens"
    ),
    "native_group_norm": "Normalise each token alone, for example with LayerNorm over the channels",
    "native_layer_norm": "Normalise each token alone: LayerNorm over the channels only",
    "softmax": "Let this softmax run over the channels or experts of each token, not over the tokens",
}
# Remedies if real tokens must not see padding. "shown" is 1 at real tokens.
_MAXIMUM = "Take the maximum over real tokens: x.masked_fill(shown[..., None] == 0, float('-inf')).amax(1)"
_SELECT = "Select the last real token: x[torch.arange(len(x)), shown.sum(1) - 1]"
_OF_REAL = {
    "mean": "Take the mean over real tokens: (x * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)",
    "sum": "Add up real tokens alone: (x * shown[..., None]).sum(1)",
    **dict.fromkeys(("max", "amax"), _MAXIMUM),
    **dict.fromkeys(("select", "index"), _SELECT),
    "convolution": "Set padding to 0 before the convolution: x * shown[..., None]",
}
_OTHER = "Leave padding out of this operator: multiply its input by shown[..., None], or use masked_fill"
#: Cause and remedy if the number of padded tokens alone changes results, in an unknown way.
OF_LENGTH = (
    "The number of padded tokens changes this result. Their numbers do not",
    "The doctor has tried no remedy. Look for the padded length, such as x.shape[1], in front of this line",
)
_STRIDE = (
    "Hide the padding in this call's mask. If a layer with a stride shortens the tokens, shorten the mask in "
    "the same way: shown[:, ::stride]"
)


def cause_of_mixing(operator: str) -> str:
    """Say which operator mixes tokens."""
    if not operator:
        return MIXED
    return f"{operator} mixes tokens at this line: its result is the first one that changes"


def remedy_of_mixing(kind: str, operator: str, padding: str) -> str:
    """Write the remedy for an operator outside of attention that mixes tokens, which may be unknown.

    Args:
        kind: "leak", "causality-lost" or "mask-lost".
        operator: Name of the operator, or "".
        padding: Name of the padding mask.
    """
    known = {"causality-lost": _OF_EARLIER, "mask-lost": _OF_REAL}.get(kind, {})
    other = _OTHER if operator and kind == "mask-lost" else OUTSIDE[kind]
    return known.get(operator, other).replace("shown", real_tokens(padding))


def of_operator(padding: str, operator: str, *, by_length: bool = False) -> tuple[str, str]:
    """Write cause and remedy for an operator that reads padding, which may be unknown.

    Args:
        padding: Name of the padding mask.
        operator: Name of the operator, or "".
        by_length: The number of padded tokens alone changes results.
    """
    if by_length:
        remedy = OF_LENGTH[1]
        if operator in _OF_REAL:
            remedy = remedy_of_mixing("mask-lost", operator, padding)
        return OF_LENGTH[0], remedy
    cause = "The result of this operator depends on padding, and its inputs at real tokens do not"
    cause = cause if operator else "The doctor found no operator that reads padding first"
    return cause, remedy_of_mixing("mask-lost", operator, padding)


def of_call(padding: str, mask: Place | None) -> tuple[str, str]:
    """Write cause and remedy for an attention call, with the last line before it that reads the mask."""
    last = f"The last line before it that computes with {padding} is {mask}"
    last = last if mask is not None else f"No line before it computes with {padding}"
    return f"This call shows padding ({padding}). {last}", _STRIDE.replace("shown", real_tokens(padding))
