"""Comparison of compiled and eager results, and the module that differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attnspan_lab.doctor.findings import Finding, texts_of
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.tolerances import is_rounding
from attnspan_lab.doctor.torch.cost.gradients import cut_lines
from attnspan_lab.doctor.torch.recording.calls import CannotRun
from attnspan_lab.doctor.torch.recording.compiler_log import compile_error
from attnspan_lab.doctor.torch.restored_state import State
from attnspan_lab.doctor.torch.steps import compiled_form, outcome_of
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text
from attnspan_lab.zoo.step import Outcome, differences, in_float64

__all__ = ["parity"]


def parity(subject: Subject, say: Callable[..., None], backend: str) -> None:
    """Compare results and gradients of a compiled step with eager float64.

    If the model cannot run in float64, the reference is eager float32. A model that is random in training
    mode is compared in evaluation mode.
    """
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        what = "This machine has no C++ compiler, which torch.compile needs on CPU"
        texts = texts_of("environment", "no-compiler")
        say(finding=Finding("environment", what, (), (), *texts, stage="parity"))
        backend = "aot_eager"
    try:
        _compare(subject, say, backend)
    except CannotRun as error:
        say(facts={"unchecked": {"compiled results": str(error)}}, stage="parity")


def _compare(subject: Subject, say: Callable[..., None], backend: str) -> None:
    batch, subject.start = subject.batches[0], State(subject.model)
    try:
        with torch.compiler.set_stance("force_eager"):
            mode = "training mode" if subject.model.training else "evaluation mode"
            plain, random = _step_of(subject, batch)
            if random and subject.model.training:
                subject.model.eval()
                mode = "evaluation mode, because the model is random in training mode"
                plain, random = _step_of(subject, batch)
            exact = _exact(subject, batch)
    except Exception as error:  # Another stage reports it.
        raise CannotRun(f"the eager step raises {error_text(error)}") from error
    if random:  # Compiled code draws other random numbers.
        raise CannotRun("the model is random in evaluation mode")
    torch._dynamo.reset()
    try:
        found = outcome_of(subject, compiled_form(subject.model, backend), batch)
    except Exception as error:
        say(finding=replace(compile_error(error), stage=f"compiled by {backend}"))
        raise CannotRun("the compiled step raises") from error
    found, plain = _with_common_gradients(subject, found, plain, say)
    against = "eager float64" if exact is not None else "eager mode (the model does not run in float64)"
    exact = exact or plain
    exact = replace(exact, gradients={k: x for k, x in exact.gradients.items() if k in plain.gradients})
    mine, theirs = differences(found, exact), differences(plain, exact)
    if any(x != x for x in theirs):  # Another stage reports it.
        raise CannotRun("the eager step returns NaN")
    compared = f"backend {backend}, first batch, against {against}, in {mode}"
    facts = {"backend": backend, "against": against, "errors": [*mine], "eager errors": [*theirs]}
    say(facts={**facts, "checked": {"compiled results": compared}}, stage="parity")
    floats = (x.dtype for x in subject.model.parameters() if x.is_floating_point())
    eps = torch.finfo(next(floats, torch.float32)).eps
    for what, own, like in zip(("results", "gradients"), mine, theirs, strict=True):
        if not is_rounding(own, like, eps):
            text = f"Compiled {what} differ from {against} by {own:.1e}, eager {what} by {like:.1e}"
            evidence = f"backend {backend}, {mode}, norm of the difference over the norm"
            places = _guilty(subject, batch, backend)
            say(finding=Finding("parity", text, places, (evidence,), stage="parity"))
            return


def _step_of(subject: Subject, batch: Any) -> tuple[Outcome, bool]:
    """Run an eager step, and say whether its results depend on random numbers."""
    plain, again = (outcome_of(subject, subject.model, batch, seed) for seed in range(2))
    return plain, differences(again, plain)[0] > 0


def _with_common_gradients(
    subject: Subject, found: Outcome, plain: Outcome, say: Callable[..., None]
) -> tuple[Outcome, Outcome]:
    """Report parameters with a gradient in one step only. Then only results are left to compare."""
    sides = ("compiled", "eager", found, plain, "no-gradient"), ("eager", "compiled", plain, found, "parity")
    differ = False
    for side, other, own, lacking, kind in sides:
        if names := own.gradients.keys() - lacking.gradients.keys():
            differ = True
            what = f"{_listed(names)} a gradient in the {side} step, and none in the {other} step"
            cause = f"The {other} step does not reach them in its backward pass"
            places = cut_lines(subject, subject.batches[0], names) if side == "compiled" else ()
            say(finding=Finding(kind, what, places, (), cause, stage="parity"))
    if differ:  # Parameters before the cut have other gradients for the same reason.
        return replace(found, gradients={}), replace(plain, gradients={})
    return found, plain


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    text = ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
    return f"{counted(len(listed), 'parameter')} ({text}) {'has' if len(listed) == 1 else 'have'}"


def _exact(subject: Subject, batch: Any) -> Outcome | None:
    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        wide = subject.copy()
        wide.model.double()
        with in_float64():
            return outcome_of(wide, wide.model, tree_map(double, batch))
    except Exception:
        return None  # An operator without float64.


def _guilty(subject: Subject, batch: Any, backend: str) -> tuple[Place, ...]:
    """Compile each module alone, and find the smallest one whose compiled forward differs from eager."""
    seen: dict[str, Any] = {}

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            seen.setdefault(name, (module, args, kwargs, out.detach().clone()))

    with ExitStack() as hooks, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for name, x in subject.model.named_modules():
            hooks.callback(x.register_forward_hook(partial(keep, name), with_kwargs=True).remove)
        torch.manual_seed(0)
        subject.call(subject.model, batch)
    guilty: nn.Module = subject.model
    for _, (module, args, kwargs, out) in sorted(seen.items(), key=lambda x: -x[0].count(".")):
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                alone: Callable[..., Any] = torch.compile(module, backend=backend)
                found = alone(*args, **kwargs)
        except Exception:
            continue
        if not torch.allclose(found, out, rtol=1e-3, atol=1e-4):
            guilty = module
            break
    code = type(guilty).forward.__code__
    return (Place(code.co_filename, code.co_firstlineno, f"{type(guilty).__name__}.forward"),)
