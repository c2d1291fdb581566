"""Watcher of torch functions: the function behind an operator, and values that Python code reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import attnspan
import attnspan_lab
from attnspan_lab.doctor.places import Place, on_stack, place_here
from attnspan_lab.doctor.torch.numbers.overflow import Overflow, overflow_of_data
from attnspan_lab.doctor.torch.recording.operators import is_plain

__all__ = ["Function", "is_own"]

# Functions that give values to Python.
_TO_PYTHON = {"tolist", "numpy", "__array__", "__repr__", "__format__"}
_ATTNSPAN = str(Path(attnspan.__file__).parent)
_LAB = str(Path(attnspan_lab.__file__).parent)


class Function(TorchFunctionMode):
    """Records the torch function that an operator runs for."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[Any, dict[str, Any]] | None = None
        self.reads: dict[Place | None, int] = {}
        self.converts = 0
        self.overflows: list[tuple[Tensor, Overflow]] = []

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(fn, "__name__", "")
        if name in _TO_PYTHON and any(is_plain(x) for x in args):
            self.converts += 1  # Converting to text reads many values. It counts once.
            try:
                return fn(*args, **kwargs)
            finally:
                self.converts -= 1
                place = place_here()
                if not self.converts and not is_own(place):
                    self.reads[place] = self.reads.get(place, 0) + 1
        if name != "scaled_dot_product_attention":
            out = fn(*args, **kwargs)
            if name == "tensor" and args and (found := overflow_of_data(args[0], out, place_here())):
                self.overflows.append((out, found))
            return out
        before, self.given = self.given, (args, kwargs)
        try:
            return fn(*args, **kwargs)
        finally:
            self.given = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Keep this mode in backward passes, in which checkpoints call torch functions again.

        torch leaves a mode while it handles a function, and it handles ``backward`` so.
        """
        autograd: Any = torch.autograd
        overrides: Any = torch.overrides
        run = autograd._engine_run_backward

        def run_in_mode(*args: Any, **kwargs: Any) -> Any:
            if self in overrides._get_current_function_mode_stack():
                return run(*args, **kwargs)
            with self:
                return run(*args, **kwargs)

        autograd._engine_run_backward = run_in_mode
        try:
            yield
        finally:
            autograd._engine_run_backward = run


def is_own(place: Place | None) -> bool:
    """Whether attnspan or the doctor reads a value below a line. Compiled code has no such reads."""
    return place is None or any(on_stack(own, place.file) for own in (_ATTNSPAN, _LAB))
