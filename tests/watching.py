"""Which operators run in a block."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watching(TorchDispatchMode):
    """Collects in `seen` what `note(operator, arguments, result)` says of each operator, unless that is None.

    By default it is the operator's name.
    """

    def __init__(self, note: Callable[..., Any] = lambda operator, *_: str(operator)) -> None:
        super().__init__()
        self.note, self.seen = note, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        named = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | (kwargs or {})
        said = self.note(func, named, result)
        self.seen += [] if said is None else [said]
        return result

    @property
    def counts(self) -> Counter:
        return Counter(self.seen)


def tensors_of(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]
