"""Causes and remedies of padding that reaches real tokens, by the operator that reads it."""

from __future__ import annotations

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.torch.isolation.declared import real_tokens

__all__ = ["LOCAL", "of_call", "of_operator"]

#: Operators whose results some models let padding change on purpose.
LOCAL = ("convolution", "native_group_norm")
#: Remedies by operator. "shown" is 1 at real tokens.
_REMEDIES = {
    "mean": "Take the mean over real tokens: (x * shown[..., None]).sum(1) / shown.sum(1, keepdim=True)",
    "sum": "Add up real tokens alone: (x * shown[..., None]).sum(1)",
    "max": "Take the maximum over real tokens: x.masked_fill(shown[..., None] == 0, float('-inf')).amax(1)",
    "select": "Select the last real token: x[torch.arange(len(x)), shown.sum(1) - 1]",
    "convolution": "Set padding to 0 before the convolution: x * shown[..., None]",
}
_ALIKE = {"amax": "max", "index": "select"}
_OTHER = "Leave padding out of this operator: multiply its input by shown[..., None], or use masked_fill"
_CAUSE = "The result of this operator depends on padding, and its inputs at real tokens do not"
_UNKNOWN = "The doctor found no operator that reads padding first"
_STRIDE = (
    "Hide the padding in this call's mask. If a layer with a stride shortens the tokens, shorten the mask in "
    "the same way: shown[:, ::stride]"
)


def of_operator(padding: str, name: str) -> tuple[str, str]:
    """Write cause and remedy for an operator outside of attention. Without a name, it is unknown."""
    remedy = _REMEDIES.get(_ALIKE.get(name, name), _OTHER)
    return (_CAUSE if name else _UNKNOWN), remedy.replace("shown", real_tokens(padding))


def of_call(padding: str, mask: Place | None) -> tuple[str, str]:
    """Write cause and remedy for an attention call, with the last line before it that reads the mask."""
    last = f"The last line before it that computes with {padding} is {mask}"
    last = last if mask is not None else f"No line before it computes with {padding}"
    return f"This call shows padding ({padding}). {last}", _STRIDE.replace("shown", real_tokens(padding))
