"""Which backends ran: their functions, counted by name."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any

from attnspan import backends

_runs: Counter[str] = Counter()


@contextmanager
def counted(framework: str) -> Iterator[Counter[str]]:
    """Counts the calls of the functions of each backend: in JAX, while a program is traced.

    The compiled module runs torch's "cpu" without one of its functions, so "cpu" has no count in torch.
    """
    table = dict(backends.table(framework))
    backends._replace(framework, {name: _counting(backend) for name, backend in table.items()})
    _runs.clear()
    try:
        yield _runs
    finally:
        backends._replace(framework, table)


@cache  # One object for each: to JAX another backend is another program.
def _counting(backend: backends.Backend) -> backends.Backend:
    names = ("forward", "backward", "attend")
    return replace(backend, **{x: _counts(backend.name, getattr(backend, x)) for x in names})


def _counts(name: str, function: Callable[..., Any] | None) -> Any:
    if function is None:
        return None

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        _runs[name] += 1
        return function(*args, **options)

    return run
