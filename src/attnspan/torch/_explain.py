"""Explanation of a call: its backend, the reasons against the others, and the amount of work."""

from typing import Any

import torch
from torch import Tensor

from attnspan.backends import table
from attnspan.call import Call, check_keywords, forwards_to
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import Given
from attnspan.errors import DtypeError, expect
from attnspan.kernels import Explanation

from ._attention import attention
from ._front import TorchFront
from ._vendor import kernel_of
from .choice import choose_backend
from .dtensor import ShardedMask
from .ops import visible_pairs


@forwards_to(attention)
def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Explain what `attention` would do with the same arguments, without running it.

    Args:
        q: Queries, as for `attention`.
        k: Keys, as for `attention`.
        v: Values, as for `attention`.
        **options: Keywords of `attention`.

    Returns:
        The selected backend, the reason against each other backend, and the number of visible pairs. Print
        it.

    Raises:
        ValueError: As for `attention`.
        TypeError: As for `attention`, or the mask is a plan. A plan has its own ``explain``.

    Example:
        >>> from attnspan import causal
        >>> x = torch.randn(1, 2, 4, 8, dtype=torch.float64)
        >>> explain(x, x, x, mask=causal(), backend="math").coverage
        0.625
    """
    check_keywords(explain, options)
    asked = {**(attention.__kwdefaults__ or {}), **options}
    front = TorchFront(asked.pop("return_lse"), widens=True)
    mask, scale, layout, backend = (asked.pop(name) for name in ("mask", "scale", "layout", "backend"))
    backend = asked_for(backend)
    wanted, got = (
        "the mask of a call on one device",
        f"{type(mask).__name__}, which spreads a call over ranks",
    )
    one = not isinstance(mask, ShardedMask)
    expect(one, "explain: mask", wanted, got, "Call its own explain()", error=DtypeError)
    call = Call.of(front, q, k, v, Given(**asked), mask=mask, scale=scale, layout=layout)
    chosen, pairs = choose_backend(call.problem, backend).name, visible_pairs(call.q, call.k, call.bounds)
    more: dict[str, Any] = {"threads": torch.get_num_threads() if call.q.is_cpu else None}
    if chosen == "vendor":
        more["kernel"] = kernel_of(call.q, call.k, call.v, call.band)
    named = backend is not None
    return Explanation.of(call, table("torch"), chosen, named, pairs, **more)
