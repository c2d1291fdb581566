"""Whether kernels run in Triton's interpreter."""

from contextvars import ContextVar

#: See `attnspan.experimental.triton.interpreted`.
interpret = ContextVar("attnspan_triton_interpret", default=False)
