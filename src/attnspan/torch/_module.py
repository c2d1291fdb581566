"""Attention as a module, for models that keep their options in modules."""

from typing import Any

from torch import Tensor, nn

from ._attention import AnyMask, attention


class Attention(nn.Module):
    """`attention` with its options fixed; it has no parameters.

    Args:
        **options: Keywords of `attention`, used by every call.

    Raises:
        TypeError: When called with an option that `attention` does not have.

    Example:
        >>> import torch
        >>> from attnspan import causal
        >>> layer = Attention(mask=causal(), layout="bshd", backend="math")
        >>> x = torch.randn(1, 5, 2, 8)
        >>> layer(x, x, x).shape
        torch.Size([1, 5, 2, 8])
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend; a ``mask`` given here takes the place of the module's.

        Args:
            q: Queries, in the module's layout.
            k: Keys.
            v: Values.
            mask: The mask of this call, such as one prepared for this batch.

        Returns:
            What `attention` returns.
        """
        options = self.options if mask is None else {**self.options, "mask": mask}
        return attention(q, k, v, **options)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
