"""The registry of backends of torch and JAX. attnspan's own backends and yours register here.

A backend is three functions. ``supports(problem)`` returns None, or the reason why the backend cannot run a
call. In JAX it is ``supports(problem, part)``. ``part`` has the numbers that a program is compiled for. Its
arrays are placeholders without a shape or a dtype, or None for options that the call lacks. The answer may
depend only on these arguments, because eager calls of JAX ask once. ``forward`` and ``backward`` compute a
`Part`: a whole call, or the part of a call that one step of a plan has. If a query sees no key, its output is
0 and its lse is -inf, or its sink.

In torch, the functions write into tensors in (B, H, S, D) order, and autograd is off:

* ``forward(part, out)`` writes the output into ``out``, of q's dtype or float32, with a unit last stride. It
  returns lse in float64, shape (B, H, Sq).
* ``backward(part, whole, grads)`` writes the gradients of q, k and v into the three tensors ``grads``, of q's
  dtype or float32. It returns the gradients of the bias and the sinks, each None if there is none. ``whole``
  is a `Softmax`.

In JAX, the functions return arrays:

* ``forward(part)`` returns out and lse, shape (B, H, Sq). A query with illegal bounds has NaN in both.
* ``backward(part, out, lse, dout, dlse, want_dbias)`` returns the gradients of q, k, v, the bias and the
  sinks. A ``dlse`` of None means zeros.

The table of a framework lists the preferred backend first. A call without ``backend=`` runs on the first one
that has the call's device in ``default_on`` and supports the call. The call passes the name to its operator,
and no other code chooses again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple

from attnspan.base.forks import ForkSafeLock
from attnspan.call import Part, Problem
from attnspan.errors import BackendError, DtypeError, OptionError, expect

__all__ = [
    "Backend",
    "Choice",
    "Part",
    "Problem",
    "Registration",
    "Softmax",
    "choose",
    "defaults",
    "find",
    "load",
    "register",
    "table",
]

#: Entry-point groups of other packages, by framework. Each entry point refers to a `Backend`.
GROUPS = {"torch": "attnspan.backends.torch", "jax": "attnspan.backends.jax"}
#: All options of `Problem.options` that attnspan's own kernels compute.
ALL_OPTIONS = ("softcap", "bias", "sinks", "dropout")
#: The device in ``default_on`` that stands for all devices.
EVERYWHERE = "*"

_LAYOUTS = ("bhsd", "bshd")


class _Registered(NamedTuple):
    """The backends of a framework, keyed by name, and the names of its default backends, keyed by device.

    `EVERYWHERE` stands for the devices that no backend names.
    """

    table: dict[str, Backend]
    defaults: dict[str, tuple[str, ...]]


_registered = {name: _Registered({}, {EVERYWHERE: ()}) for name in ("torch", "jax")}
_lock = ForkSafeLock()


class Softmax(NamedTuple):
    """A whole softmax: its results and their gradients. A part of a call has some or all of its keys.

    Args:
        out: Shape (B, H, n, Dv), in q's dtype.
        lse: Shape (B, H, n), float64.
        dout: Gradient of ``out``.
        dlse: Gradient of ``lse``, or None.
        has_more: Whether the softmax has keys that the part does not have.
        want_dbias: Whether the gradient of the bias is used.

    Example:
        >>> import torch
        >>> out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, dtype=torch.float64)
        >>> Softmax(out, lse, torch.ones_like(out), None).has_more
        False
    """

    out: Any
    lse: Any
    dout: Any
    dlse: Any
    has_more: bool = False
    want_dbias: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Backend:
    """A backend of one framework. The docstring of `attnspan.backends` describes its functions.

    Args:
        name: Its name in ``backend=``.
        supports: Returns None, or the reason why the backend cannot run a call.
        forward: Computes out and lse.
        backward: Computes gradients. None in JAX if JAX differentiates ``forward``.
        framework: "torch" or "jax".
        default_on: Devices on which calls without ``backend=`` may use it: torch's device types, such as
            "cuda", or JAX's platforms "cpu", "gpu" and "tpu". "*" stands for all. Without devices, it is
            opt-in.
        opt_in: The reason that `explain` gives if it is opt-in.
        options: Options that ``forward`` and ``backward`` compute: names of `Problem.options`. A call with
            another option is refused, and never computed without it.
        limit: Returns None, or the reason why calls without ``backend=`` do not use it for a problem.
        layouts: JAX: the layouts of q, k and v that it reads without a transpose, "bhsd" and "bshd".
        fine_lse: JAX: ``forward(part, fine=True)`` returns a complex lse. Its imaginary part is the rounding
            error of its real part. ``backward`` receives this lse.
        reads_mask: JAX: it reads ``part.band`` and ``part.want_lse``.
        attend: torch: ``attend(call)`` returns out and lse of a whole call, and autograd differentiates it.
            By default, an operator runs ``forward`` and ``backward``.
        paged: torch: ``paged(part, table, out, lse)`` reads the pages of a `PagedCache` in place.

    Raises:
        ValueError: A value is not one of those above.
        TypeError: A value has the wrong type.

    Example:
        >>> backend = Backend(name="mine", supports=lambda problem: "it runs nothing", forward=print,
        ...                   backward=print, default_on=("cuda",))
        >>> backend.runs_by_default_on("cuda"), backend.runs_by_default_on("cpu")
        (True, False)
    """

    name: str
    supports: Callable[..., str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    framework: Literal["torch", "jax"] = "torch"
    default_on: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    opt_in: str = "it is opt-in, so a call must request it"
    limit: Callable[[Problem], str | None] | None = None
    layouts: tuple[str, ...] = ("bhsd",)
    fine_lse: bool = False
    reads_mask: bool = False
    attend: Callable[..., Any] | None = None
    paged: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("name", "opt_in", "default_on", "options", "layouts"):
            x, one = getattr(self, name), name in ("name", "opt_in")
            known = isinstance(x, str) if one else isinstance(x, tuple) and all(isinstance(y, str) for y in x)
            expected, remedy = ("a str", "Pass a str") if one else ("a tuple of str", "Pass a tuple")
            expect(known, f"Backend: {name}", expected, type(x).__name__, remedy, error=DtypeError)
        for name in ("supports", "forward", "backward", "limit", "attend", "paged"):
            x = getattr(self, name)
            known = callable(x) or (x is None and name not in ("supports", "forward"))
            expect(known, f"Backend: {name}", "a function", type(x).__name__, "Pass one", error=DtypeError)
        expect(bool(self.name), "Backend: name", "a name", "''", "Name the backend")
        known, got = self.framework in _registered, repr(self.framework)
        expect(known, "Backend: framework", "'torch' or 'jax'", got, "Register one backend for each")
        known, got = set(self.layouts) <= set(_LAYOUTS) and bool(self.layouts), repr(self.layouts)
        expect(known, "Backend: layouts", "'bhsd', 'bshd' or both", got, "Leave it out for ('bhsd',)")
        known = self.framework == "jax" or self.backward is not None
        remedy = "Pass the function of the gradients"
        expect(known, "Backend: backward", "a function, because torch calls it", "None", remedy)

    def runs_by_default_on(self, device: str) -> bool:
        """Whether calls without ``backend=`` may use it on a device."""
        return device in self.default_on or EVERYWHERE in self.default_on

    def refusal(self, problem: Problem, *facts: Any) -> str | None:
        """Return None, or the reason why it cannot run a problem."""
        reason = self.supports(problem, *facts)
        if reason is None:
            for name in problem.options:
                if name not in self.options:
                    return f"it does not compute the option {name}"
        return reason

    def against(self, problem: Problem, *facts: Any) -> str | None:
        """Return None, or the reason why a call without ``backend=`` does not use it for a problem."""
        reason = self.refusal(problem, *facts)
        if reason is None and not self.runs_by_default_on(problem.device):
            return self.opt_in
        return self.limit(problem) if reason is None and self.limit is not None else reason


class Registration:
    """A registered backend. ``remove`` it, or use the registration as a block, which removes it at its end.

    Example:
        >>> backend = Backend(name="mine", supports=lambda problem: None, forward=print, backward=print)
        >>> with register(backend):
        ...     "mine" in table("torch")
        True
        >>> "mine" in table("torch")
        False
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def remove(self) -> None:
        """Remove the backend. Calls that name it then raise an error."""
        with _lock.held():
            own = _registered[self.backend.framework].table
            if own.get(self.backend.name) is self.backend:
                _replace(self.backend.framework, {n: x for n, x in own.items() if x is not self.backend})

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *_: object) -> None:
        self.remove()


def register(backend: Backend, *, last: bool = False) -> Registration:
    """Register a backend for its framework.

    Compiled programs of torch call the backend that has the name when they run. Compiled programs of JAX keep
    the backend that they were compiled for.

    Args:
        backend: The backend.
        last: Whether all backends so far are preferred to it. By default, it is preferred to all of them.

    Raises:
        TypeError: ``backend`` is not a `Backend`.
        ValueError: The framework has a backend with this name.

    Example:
        >>> import torch
        >>> from attnspan.torch import attention, explain
        >>> def forward(part, out):
        ...     out.copy_(part.v.mean(2, keepdim=True).expand_as(out))  # each query sees all keys
        ...     return torch.zeros(part.q.shape[:3], dtype=torch.float64)
        >>> mean = Backend(name="mean", supports=lambda problem: None, forward=forward, backward=print)
        >>> x = torch.arange(4.0).view(1, 1, 2, 2)
        >>> with register(mean):
        ...     print(explain(x, x, x, backend="mean").backend, attention(x, x, x, backend="mean")[0, 0])
        mean tensor([[1., 2.],
                [1., 2.]])
    """
    known, got = isinstance(backend, Backend), type(backend).__name__
    expect(known, "register", "a Backend", got, "Call register(Backend(name=..., ...))", error=DtypeError)
    remedy = "Choose another name, or remove the other backend first"
    wanted, mine = f"a name that no backend of {backend.framework} has", {backend.name: backend}
    with _lock.held():
        own = _registered[backend.framework].table
        expect(backend.name not in own, "register: name", wanted, repr(backend.name), remedy)
        _replace(backend.framework, {**own, **mine} if last else {**mine, **own})
    return Registration(backend)


def table(framework: str) -> Mapping[str, Backend]:
    """Return the backends of a framework, keyed by name, the preferred one first.

    attnspan's own backends register when ``attnspan.torch`` or ``attnspan.jax`` is imported.

    Raises:
        KeyError: The framework is neither "torch" nor "jax".

    Example:
        >>> import attnspan.torch
        >>> table("torch")["cpu"].default_on
        ('cpu',)
    """
    return _registered[framework].table


def find(framework: str, name: str) -> Backend:
    """Return the backend that a program names when it runs.

    Raises:
        ValueError: The framework has no backend with this name.

    Example:
        >>> import attnspan.torch
        >>> find("torch", "math").default_on
        ('*',)
    """
    own, remedy = table(framework), "Register it by attnspan.backends.register before you run the program"
    expect(name in own, "backend", f"one of {', '.join(own)}", repr(name), remedy)
    return own[name]


def defaults(framework: str, device: str) -> tuple[str, ...]:
    """Return the backends that calls without ``backend=`` may use on a device, the preferred one first.

    Example:
        >>> import attnspan.torch
        >>> defaults("torch", "cpu")
        ('cpu', 'math')
    """
    own = _registered[framework].defaults
    return own.get(device, own[EVERYWHERE])


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, and the reasons why each preferred backend does not.

    Attributes:
        name: Name of the backend.
        refusals: The reason of each backend that is preferred to it, keyed by name.

    Example:
        >>> Choice("math", {"cpu": "it takes no float64"}).name
        'math'
    """

    name: str
    refusals: dict[str, str]


def choose(problem: Problem, framework: str, requested: str | None = None, *facts: Any) -> Choice:
    """Choose the backend that runs a problem.

    Args:
        problem: The problem to compute.
        framework: "torch" or "jax".
        requested: Name of the backend to use. None uses the first default backend of the problem's device
            that supports the problem.
        *facts: Further arguments of ``supports``.

    Raises:
        OptionError: If no backend has the name ``requested``.
        BackendError: If the requested backend, or every default backend, does not support the problem.

    Example:
        >>> import attnspan.torch
        >>> choose(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float64", "cpu"), "torch").name
        'math'
    """
    # One read, because another thread may register a backend meanwhile.
    backends, own = _registered[framework]
    if requested is not None and requested not in backends:
        wanted, remedy = (
            f"None or one of {', '.join(backends)}",
            "Leave out backend=, or the block of attnspan.backend",
        )
        raise OptionError("backend", expected=wanted, got=repr(requested), remedy=remedy)
    refusals: dict[str, str] = {}
    names = own.get(problem.device, own[EVERYWHERE]) if requested is None else (requested,)
    for name in names:
        backend = backends[name]
        reason = (backend.against if requested is None else backend.refusal)(problem, *facts)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    raise BackendError(
        f"backend={requested!r}",
        expected="a backend that can run the call",
        got="; ".join(f"{name}: {reason}" for name, reason in refusals.items()),
        remedy="Change what the reason names, or choose another by backend= or attnspan.backend",
    )


def _replace(framework: str, new: dict[str, Backend]) -> None:
    # New tables, because another thread may be reading the old ones.
    devices = {device for backend in new.values() for device in backend.default_on}
    own = {
        device: tuple(name for name, x in new.items() if x.runs_by_default_on(device))
        for device in (*devices, EVERYWHERE)
    }
    _registered[framework] = _Registered(new, own)


#: The modules that register the experimental backends.
_EXPERIMENTAL = {
    "torch": "attnspan.experimental.torch_backends",
    "jax": "attnspan.experimental.jax_backends",
}
_loaded: set[str] = set()


def load(framework: str) -> None:
    """Register the experimental backends of a framework, and the backends of other packages.

    ``attnspan.torch`` and ``attnspan.jax`` call it at the end of their import, so the modules of other
    packages may import them. An entry point that raises an error gives a warning, because programs that do
    not use its backend must run.

    Example:
        >>> load("torch")
        >>> "triton" in table("torch")
        True
    """
    if framework in _loaded:
        return
    _loaded.add(framework)
    import_module(_EXPERIMENTAL[framework])
    for point in entry_points(group=GROUPS[framework]):
        try:
            register(point.load())
        except Exception as error:
            text = f"the entry point {point.name!r} of {GROUPS[framework]} registers no backend: {error}"
            warnings.warn(text, stacklevel=2)
