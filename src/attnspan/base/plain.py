"""Checks for plain arrays. The storage of a subclass may not hold the values that it represents."""

import sys

import numpy as np

from attnspan.errors import DtypeError

#: Subclasses that torch and NumPy read correctly, by module and name, so that the check imports nothing.
_PLAIN = frozenset(
    {
        "numpy.memmap",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "torch.distributed.tensor.DTensor",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nn.parameter.Parameter",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
    }
)


def check_plain(what: str, x: object) -> None:
    """Raise for an array of an unknown subclass, whose storage may not hold the values that it represents.

    Example:
        >>> check_plain("ids", np.ma.array([1, 2], mask=[False, True]))
        Traceback (most recent call last):
        attnspan.errors.DtypeError: ids: expected a plain array or tensor, got a numpy.ma.MaskedArray, whose \
storage may not hold its values. Convert it to a plain array or tensor.
    """
    kind = type(x)
    torch = sys.modules.get("torch")
    tensor = torch is not None and isinstance(x, torch.Tensor)
    if kind is np.ndarray or not (tensor or isinstance(x, np.ndarray)):
        return
    if torch is not None and kind is torch.Tensor:
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in _PLAIN:
        got = f"a {name}, whose storage may not hold its values"
        remedy = "Convert it to a plain array or tensor"
        if kind.__name__ == "CausalBias":
            remedy = (
                "Pass mask=causal() for lower right alignment, and also q_index=torch.arange(q_len) for upper"
            )
            remedy += " left alignment. scaled_dot_product_attention accepts both"
        raise DtypeError(what, expected="a plain array or tensor", got=got, remedy=remedy)


def check_strided(what: str, x: object) -> None:
    """Raise for a nested, sparse or quantized tensor.

    Most functions of torch fail on such a tensor, some with an internal error.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or torch.compiler.is_compiling():
        return
    for kind, holds, remedy in (
        ("a nested tensor", x.is_nested, "Pad it by torch.nested.to_padded_tensor, or pass lengths"),
        ("a sparse tensor", x.layout is not torch.strided, "Convert it by .to_dense()"),
        ("a quantized tensor", x.is_quantized, "Convert it by .int_repr() or .dequantize()"),
    ):
        if holds:
            raise DtypeError(what, expected="a dense tensor", got=kind, remedy=remedy)
