"""Whether kernels run in Triton's interpreter."""

from contextvars import ContextVar

__all__ = ["interpret"]

#: See `attnspan.experimental.triton.interpreted`.
interpret = ContextVar("attnspan_triton_interpret", default=False)
