"""Eager and compiled steps of a subject, and copies of it that can be changed."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.zoo.step import Outcome

__all__ = ["compiled_form", "copied", "outcome_of", "run_compiled", "step_runs"]


def copied(subject: Subject) -> Subject:
    """Copy the subject, so that its model can be changed. Return the subject itself if that fails."""
    try:
        made = subject.copy()
    except Exception:
        return subject
    for own, other in zip(subject.model.modules(), made.model.modules(), strict=True):
        # A copy of a module that compiles itself does not compile itself.
        if (compiled := getattr(own, "_compiled_call_impl", None)) is not None:
            context = inspect.getclosurevars(compiled).nonlocals.get("self")
            other._compiled_call_impl = None if context is None else context(other._call_impl)
    return made


def run_compiled(
    subject: Subject, backend: str, *, dynamic: bool | None = None
) -> tuple[CompilerLog, BaseException | None, list[float]]:
    """Run all batches. Return the compiler's log, its error, and the seconds of each step that ran."""
    torch._dynamo.reset()
    log, seconds, failed = CompilerLog(), [], None
    model = compiled_form(subject.model, backend, dynamic)
    # A compiler that fails may leave inference mode switched on.
    with log, torch.inference_mode(torch.is_inference_mode_enabled()):
        for batch in subject.batches:
            start = time.perf_counter()
            try:
                subject.step(model, batch)
            except Exception as error:
                if step_runs(subject, batch):
                    failed = error
                    break
                try:  # Eager code raises the same error. Another finding reports it.
                    with torch.no_grad():
                        subject.step(model, batch, backward=False)
                except Exception as again:
                    failed = again if step_runs(subject, batch, backward=False) else None
                    break
                continue
            seconds.append(time.perf_counter() - start)
    return log, failed, seconds


def step_runs(subject: Subject, batch: Any, *, backward: bool = True) -> bool:
    """Whether an eager step does not raise, with or without its backward pass."""
    try:
        with torch.compiler.set_stance("force_eager"), torch.set_grad_enabled(backward):
            subject.step(subject.model, batch, backward=backward)
    except Exception:
        return False
    return True


def compiled_form(model: nn.Module, backend: str, dynamic: bool | None = None) -> Callable[..., Any]:
    """Compile the model. A model that compiles itself or parts of itself stays as it is."""
    compiles = any(
        getattr(x, "_compiled_call_impl", None) or type(x).__name__ == "OptimizedModule"
        for x in model.modules()
    )
    return model if compiles else torch.compile(model, backend=backend, dynamic=dynamic)


def outcome_of(
    subject: Subject, model: Callable[..., Any], batch: Any, seed: int = 0, *, backward: bool = True
) -> Outcome:
    """Run a step with a fixed random seed, and return its results and gradients."""
    subject.restore()  # A compiled form of the model does not restore the state.
    torch.manual_seed(seed)
    results = subject.step(model, batch, backward=backward)
    return Outcome({k: x.detach().double().clone() for k, x in results.items()}, subject.gradients())
