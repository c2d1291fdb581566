"""FlexAttention on CPU tensors, as the plain array code that it consists of without a compiler."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.nn.attention import flex_attention

from attnspan.call.options import Options
from attnspan.kernels import flex


@contextmanager
def eager() -> Iterator[None]:
    """Calls of ``backend="flex"`` on CPU tensors run, and have gradients."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch asks for it
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        patch.setattr(flex, "DEVICES", (*flex.DEVICES, "cpu"))
        patch.setattr(flex, "forward", _forward)
        yield


def _forward(*tensors: Any, scale: float, options: Options | None, lowered_for: Any = None) -> Any:
    return flex.attend(*tensors, scale, options or Options(), lowered_for)
