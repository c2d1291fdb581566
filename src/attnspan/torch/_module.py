"""Attention as a module, for models that store their options in modules."""

from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from attnspan.base.pytrees import short
from attnspan.call import check_keywords
from attnspan.call.options import Bias

from ._attention import AnyMask, attention


class Attention(nn.Module):
    """A module that calls `attention` with fixed options.

    The module registers ``sinks`` and the tensors of ``bias``. A `torch.nn.Parameter` becomes a parameter of
    the module. Any other tensor becomes a buffer, which moves with the module and is not in its state dict.
    Their names are ``sinks`` and ``bias``, or ``bias_`` and the field, such as ``bias_slopes``. Dropout is
    active only in training mode, as in torch's modules.

    Args:
        **options: Keywords of `attention` for every call.

    Raises:
        TypeError: `attention` does not have an option.

    Example:
        >>> import torch
        >>> from attnspan import causal
        >>> sinks = nn.Parameter(torch.zeros(2))
        >>> layer = Attention(mask=causal(), layout="bshd", sinks=sinks, backend="math")
        >>> x = torch.randn(1, 5, 2, 8)
        >>> layer(x, x, x).shape, [name for name, _ in layer.named_parameters()]
        (torch.Size([1, 5, 2, 8]), ['sinks'])
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        check_keywords(attention, options)
        self.options = options
        # Type and fields of a bias. Tensors among the fields are also registered.
        self._bias: tuple[Any, dict[str, Any]] | None = None
        self._kept: list[str] = []
        bias = options.get("bias")
        self._keep("sinks", options.get("sinks"))
        self._keep("bias", bias)
        if isinstance(bias, Bias):
            values = {field.name: getattr(bias, field.name) for field in fields(bias)}  # type: ignore[arg-type]
            for name, value in values.items():
                self._keep(f"bias_{name}", value)
            self._bias = type(bias), values

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        elif isinstance(value, Tensor):
            self.register_buffer(name, value, persistent=False)
        else:
            return
        self._kept.append(name)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Call `attention`. Options that you pass here, such as ``mask``, replace the module's options.

        Arguments, results and errors are the same as for `attention`. You may pass a mask that is prepared
        for this batch.
        """
        own = {**self.options, **{name: getattr(self, name) for name in self._kept if name in self.options}}
        if self._bias is not None:
            kind, values = self._bias
            here = {name: getattr(self, f"bias_{name}", value) for name, value in values.items()}
            own["bias"] = kind(**here)
        if not self.training:
            own.pop("dropout_p", None)
        if mask is not None:
            own["mask"] = mask
        return attention(q, k, v, **{**own, **options})  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Options as text, for ``print(model)``."""
        words = {name: short(x) if isinstance(x, Tensor) else repr(x) for name, x in self.options.items()}
        return ", ".join(f"{name}={word}" for name, word in words.items())
