"""The parts of an examination, each run in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attnspan.tools.doctor.attention import findings_of
from attnspan.tools.doctor.compiler import CompilerLog, Recompile, compile_error
from attnspan.tools.doctor.findings import Finding, Place, lines_in
from attnspan.tools.doctor.matrix import Cell, all_cells, covering, run_cells, smallest
from attnspan.tools.doctor.ranks import compare_ranks
from attnspan.tools.doctor.subject import Subject
from attnspan.tools.doctor.swap import attnspan_in, swapped
from attnspan.tools.doctor.watch import watching
from attnspan.tools.zoo.step import Outcome, differences, in_float64
from attnspan.tools.zoo.watch import profiled

__all__ = ["STAGES", "Say", "compiled", "cure", "eager", "features", "parity", "ranks"]

Say = Callable[..., None]
#: Recompilations of one frame that are torch's own design: the second size makes a dimension dynamic.
_ALLOWED = 1
# A compiled step may err so many times as much as eager does; fused kernels add in another order.
_FACTOR, _FLOOR = 16.0, 128
_OPERATOR = "attnspan::attention"
_REMEDIES = {
    "size": "Mark the dimension: torch._dynamo.mark_dynamic(x, dim), or use torch.compile(dynamic=True)",
    "number": "Pass the number as a tensor: torch.tensor(n), or a buffer if it is an attribute",
    "other": "Keep what the condition names the same in all calls",
}


def eager(subject: Subject, say: Say, backend: str) -> None:
    """Watch the model's own steps."""
    del backend
    calls = largest = 0
    for batch in _distinct(subject)[:3]:
        backward = True
        try:
            seconds = _timed(subject, batch)
        except Exception as error:
            say(finding=_raised(error, "eager"))
            if not _forward_runs(subject, batch):
                return
            backward, seconds = False, 0.0
        with watching(subject.rows(batch)) as watcher, torch.set_grad_enabled(backward):
            subject.step(subject.model, batch, backward=backward)
        for finding in findings_of(watcher, subject, batch, seconds):
            say(finding=replace(finding, stage="eager"))
        calls, largest = max(calls, len(watcher.calls)), max(largest, watcher.largest)
        kinds = sorted({f"{x.kind} {x.kernel}".strip() for x in watcher.calls})
        say(facts={"attention calls": calls, "kernels": kinds, "largest tensor": largest})
        if (picture := _picture(watcher.calls)) is not None:
            say(facts={"mask": picture})


def _timed(subject: Subject, batch: Any) -> float:
    """Seconds of the second of two eager steps."""
    with torch.compiler.set_stance("force_eager"):
        subject.step(subject.model, batch)
        start = time.perf_counter()
        subject.step(subject.model, batch)
    return time.perf_counter() - start


def _picture(calls: list[Any]) -> list[str] | None:
    """Which keys the first batch row of the last call sees, a string of 0 and 1 for each row."""
    shown = [x.visible for x in calls if x.visible is not None and max(x.visible.shape[1:]) <= 256]
    return ["".join("01"[int(x)] for x in row) for row in shown[-1][0].tolist()] if shown else None


def _distinct(subject: Subject) -> list[Any]:
    """One batch of each shape."""
    found: dict[Any, Any] = {}
    for batch in [*subject.more, *subject.batches]:
        found.setdefault(tuple((k, tuple(x.shape)) for k, x in subject.named(batch).items()), batch)
    return list(found.values())


def _forward_runs(subject: Subject, batch: Any) -> bool:
    try:
        with torch.no_grad():
            subject.step(subject.model, batch, backward=False)
    except Exception:
        return False
    return True


def _raised(error: BaseException, stage: str) -> Finding:
    places = lines_in("".join(traceback.format_exception(error)))
    text = (str(error).strip().splitlines() or [""])[0][:200]
    remedy = ""
    if "FlexAttention does not support backward on CPU" in str(error):
        remedy = "Train on a GPU, or call attnspan.torch.attention, which has a backward pass on CPUs"
    what = f"The model's own step raises {type(error).__name__}: {text}"
    return Finding("error", what, tuple(places[:3]), remedy=remedy, stage=stage)


def compiled(subject: Subject, say: Say, backend: str, attention: str = "own") -> None:
    """Compile the model, or leave it as it compiles itself, and run all batches."""
    stage = "compiled" if attention == "own" else "without attention"
    before = subject
    if attention == "own":
        before = _copied(subject)
    with swapped(attention):
        log, error, seconds = _run_compiled(subject, backend)
    say(facts=_facts(log, seconds), stage=stage)
    if error is not None:
        say(finding=replace(compile_error(error, stage), stage=stage))
    for finding in log.breaks:
        say(finding=replace(finding, stage=stage))
    for finding in _recompiles(log) if len(seconds) == len(subject.batches) else ():
        tried = _tried(finding, log, before, backend) if attention == "own" else ""
        say(finding=replace(finding, stage=stage, tried=tried))


def _copied(subject: Subject) -> Subject:
    try:
        return subject.copy()
    except Exception:
        return subject


def _run_compiled(
    subject: Subject, backend: str, *, dynamic: bool | None = None
) -> tuple[CompilerLog, BaseException | None, list[float]]:
    torch._dynamo.reset()
    log, seconds, failed = CompilerLog(), [], None
    model = _compile(subject.model, backend, dynamic)
    with log:
        for batch in subject.batches:
            start = time.perf_counter()
            try:
                subject.step(model, batch)
            except Exception as error:
                failed = error
                if not _step_runs(subject, batch):
                    failed = None  # Eager code raises the same, which another finding says.
                    try:
                        with torch.no_grad():
                            subject.step(model, batch, backward=False)
                        continue
                    except Exception as again:
                        failed = again if _forward_runs(subject, batch) else None
                break
            seconds.append(time.perf_counter() - start)
    return log, failed, seconds


def _step_runs(subject: Subject, batch: Any) -> bool:
    try:
        with torch.compiler.set_stance("force_eager"):
            subject.step(subject.model, batch)
    except Exception:
        return False
    return True


def _compile(model: nn.Module, backend: str, dynamic: bool | None = None) -> Callable[..., Any]:
    parts = [
        x
        for x in model.modules()
        if getattr(x, "_compiled_call_impl", None) or type(x).__name__ == "OptimizedModule"
    ]
    return model if parts else torch.compile(model, backend=backend, dynamic=dynamic)


def _facts(log: CompilerLog, seconds: list[float]) -> dict[str, Any]:
    return {
        "graphs": log.forward_graphs,
        "breaks": len(log.breaks),
        "recompiles": len(log.recompiles),
        "compile seconds": log.compile_seconds,
        "step seconds": seconds,
        "timeline": [(x.function, x.start, x.end, x.forward, x.operators) for x in log.graphs],
    }


def _recompiles(log: CompilerLog) -> Iterator[Finding]:
    """A finding for each frame that is compiled more often than torch means to."""
    frames: dict[int, list[Recompile]] = {}
    for x in log.recompiles:
        frames.setdefault(x.frame, []).append(x)
    for number, reasons in frames.items():
        if len(reasons) <= _ALLOWED and not log.limits:
            continue
        last, frame = reasons[-1], log.frames.get(number)
        place = last.place or next((x.place for x in reversed(reasons) if x.place), None) or frame
        limit = any(frame is not None and f"{frame.file}:{frame.line})" in x for x in log.limits)
        what = f"This code is compiled {len(reasons) + 1} times"
        if limit:
            what = (
                f"The limit of recompilations is reached after {len(reasons)}: then this code runs uncompiled"
            )
        guards = list(dict.fromkeys(x.guard for x in reversed(reasons)))[:3]
        yield Finding(
            "recompile-limit" if limit else "recompile",
            what,
            tuple(dict.fromkeys(x for x in (place, frame) if x is not None)),
            (*(f"guard that failed: {x}" for x in guards), "TORCH_LOGS=recompiles shows each"),
            f"Compiled code holds only while {' '.join(last.guard.split())[:120]}, and this changes",
            _REMEDIES[last.kind],
            count=len(reasons),
        )


def _tried(finding: Finding, log: CompilerLog, subject: Subject, backend: str) -> str:
    """Try what mends a recompilation, and say what came of it."""
    guards, before = " ".join(finding.evidence), len(log.recompiles)
    trials: list[tuple[str, Callable[[], Subject], bool | None]] = []
    if finding.remedy == _REMEDIES["size"]:
        trials = [("all sizes dynamic", lambda: _copied(subject), True)]
    else:
        trials = [
            (f"{x} as a tensor", partial(_with_tensor, subject, x), None) for x in _numbers(guards, subject)
        ]
        if any(_is_number(x) for batch in subject.batches for x in _values(batch)):
            trials += [("numbers of the batch as tensors", partial(_with_tensors, subject), None)]
    for what, make, dynamic in trials:
        try:
            again, error, _ = _run_compiled(make(), backend, dynamic=dynamic)
        except Exception:
            continue
        if error is None and len(again.recompiles) < before:
            return f"with {what}: {len(again.recompiles)} recompilations instead of {before}"
    return f"{' and '.join(x[0] for x in trials)}: no fewer recompilations" if trials else ""


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _values(batch: Any) -> list[Any]:
    return (
        list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, tuple) else []
    )


def _numbers(guards: str, subject: Subject) -> list[str]:
    """Attributes of modules that hold numbers, of the names that guards use."""
    names = dict.fromkeys(re.findall(r"\.(\w+) *[=!<>]=? *-?\d", guards))
    return [x for x in names if any(_is_number(m.__dict__.get(x)) for m in subject.model.modules())][:3]


def _with_tensor(subject: Subject, name: str) -> Subject:
    made = _copied(subject)
    for module in made.model.modules():
        if _is_number(module.__dict__.get(name)):
            setattr(module, name, torch.tensor(module.__dict__[name]))
    return made


def _with_tensors(subject: Subject) -> Subject:
    def wide(x: Any) -> Any:
        return torch.tensor(x) if _is_number(x) else x

    def changed(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {k: wide(x) for k, x in batch.items()}
        return type(batch)(map(wide, batch)) if isinstance(batch, (tuple, list)) else batch

    made = _copied(subject)
    return Subject(made.model, [changed(x) for x in made.batches], made.expected)


def parity(subject: Subject, say: Say, backend: str) -> None:
    """Compare a compiled step, results and gradients, with eager float64."""
    if backend == "inductor" and not _has_compiler():
        say(finding=_NO_COMPILER)
        backend = "aot_eager"
    batch = subject.batches[0]
    try:
        with torch.compiler.set_stance("force_eager"):
            plain, again = (_outcome(subject, subject.model, batch) for _ in range(2))
            if differences(again, plain)[0] > 0:
                subject.model.eval()
                plain = _outcome(subject, subject.model, batch)
            exact = _exact(subject, batch)
    except Exception:
        return  # The model's own step raises, which another stage says.
    torch._dynamo.reset()
    try:
        found = _outcome(subject, _compile(subject.model, backend), batch)
    except Exception as error:
        say(finding=replace(compile_error(error, "parity"), stage=f"compiled by {backend}"))
        return
    exact = exact or plain
    mine, theirs = differences(found, exact), differences(plain, exact)
    if any(x != x for x in theirs):
        return  # Eager mode itself makes NaN, which another stage says.
    eps = torch.finfo(
        next((x.dtype for x in subject.model.parameters() if x.is_floating_point()), torch.float32)
    ).eps
    say(facts={"backend": backend, "errors": [*mine], "eager errors": [*theirs]}, stage="parity")
    for what, own, like in zip(("results", "gradients"), mine, theirs, strict=True):
        if not own <= _FACTOR * like + _FLOOR * eps:
            text = f"Compiled {what} are {own:.1e} away from eager float64; eager itself is {like:.1e} away"
            evidence = f"backend {backend}; norm of the difference over the norm"
            say(
                finding=Finding("parity", text, _guilty(subject, batch, backend), (evidence,), stage="parity")
            )
            return


def _outcome(subject: Subject, model: Callable[..., Any], batch: Any) -> Outcome:
    torch.manual_seed(0)
    results = subject.step(model, batch)
    return Outcome({k: x.detach().double().clone() for k, x in results.items()}, subject.gradients())


def _exact(subject: Subject, batch: Any) -> Outcome | None:
    try:
        wide = subject.copy()
        wide.model.double()
        with in_float64():
            return _outcome(wide, wide.model, _double(batch))
    except Exception:
        return None  # An operator without float64.


def _double(batch: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def _guilty(subject: Subject, batch: Any, backend: str) -> tuple[Place, ...]:
    """The smallest module whose compiled forward differs from its own, by compiling each alone."""
    inputs: dict[str, Any] = {}

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            inputs.setdefault(name, (module, args, kwargs, out.detach().clone()))

    hooks = [
        x.register_forward_hook(partial(keep, name), with_kwargs=True)
        for name, x in subject.model.named_modules()
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            subject.call(subject.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    guilty: nn.Module = subject.model
    for _, (module, args, kwargs, out) in sorted(inputs.items(), key=lambda x: -x[0].count(".")):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.manual_seed(0)
            try:
                alone: Callable[..., Any] = torch.compile(module, backend=backend)
                found = alone(*args, **kwargs)
            except Exception:
                continue
        if not torch.allclose(found, out, rtol=1e-3, atol=1e-4):
            guilty = module
            break
    code = type(guilty).forward.__code__
    return (Place(code.co_filename, code.co_firstlineno, f"{type(guilty).__name__}.forward"),)


def _has_compiler() -> bool:
    return any(shutil.which(x) for x in (os.environ.get("CXX") or "g++", "clang++"))


_NO_COMPILER = Finding(
    "environment",
    "There is no C++ compiler on this machine, which torch.compile needs on CPUs",
    cause="The default backend, inductor, writes C++ and compiles it",
    remedy="Install g++ or set CXX; without it, backend='aot_eager' traces and runs uncompiled",
    stage="parity",
)


def cure(subject: Subject, say: Say, backend: str) -> None:
    """Run compiled steps with the model's own attention and with attnspan's, and compare."""
    after = _copied(subject)
    before, want = _measured(subject, backend)
    with swapped("attnspan"), attnspan_in(after.model):
        found, out = _measured(after, backend)
    say(facts={"own": before, "attnspan": found}, stage="cure")
    if want is None or out is None:
        return
    output, gradient = differences(out, want)
    say(facts={"difference": [output, gradient]}, stage="cure")


def _measured(subject: Subject, backend: str) -> tuple[dict[str, Any], Outcome | None]:
    """Breaks, recompilations and graphs of all batches; seconds and bytes of the last step."""
    log, error, _ = _run_compiled(subject, backend)
    found: dict[str, Any] = {"graphs": log.forward_graphs, "breaks": len(log.breaks)}
    found |= {"recompiles": len(log.recompiles), "error": str(error)[:200] if error else ""}
    if error is not None:
        return found, None
    model, batch = _compile(subject.model, backend), subject.batches[-1]
    with torch.set_grad_enabled(_step_runs(subject, batch)):
        outcome = _outcome(subject, model, batch)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            subject.step(model, batch)
            seconds.append(time.perf_counter() - start)
        _, calls, peak = profiled(lambda: subject.step(model, batch))
    found |= {"step seconds": min(seconds), "peak bytes": peak, "attnspan calls": calls.get(_OPERATOR, 0)}
    return found, outcome


def features(subject: Subject, say: Say, backend: str) -> None:
    """Run the model with the compiler and checkpointing combined, and find the smallest that fails."""
    cells = all_cells(("own",), ("one",))
    known: dict[Cell, str] = {}

    def failure(cell: Cell) -> str:
        if cell not in known:
            known[cell] = next(run_cells([cell], backend=backend, subject=subject))[1]
            say(cell={**{k: v for k, v in asdict(cell).items() if k != "mask"}, "result": known[cell]})
        return known[cell]

    failing = next((x for x in covering(cells) if failure(x)), None)
    if failing is not None:
        least = smallest(failing, lambda x: bool(failure(x)))
        what = f"Fails with {least}" if least != Cell("own") else "Fails without any feature"
        places = (failure(least),)
        say(finding=Finding("combination", f"{what}, and with no part of it", (), places, stage="features"))


def ranks(subject: Subject, say: Say, backend: str) -> None:
    """Run the model's step on two ranks and on one, and compare."""
    del backend
    step = subject.expected.get("step")
    if step is None:
        what = "There is no step to compare: the factory's expectations have no 'step'"
        say(finding=Finding("environment", what, remedy="Return one: step(batch, mesh) of named tensors"))
        return
    for finding in compare_ranks(subject):
        say(finding=replace(finding, stage="ranks"))


#: What can be run, by name.
STAGES: dict[str, Callable[[Subject, Say, str], None]] = {
    "eager": eager,
    "compiled": compiled,
    "without attention": partial(compiled, attention="identity"),
    "parity": parity,
    "cure": cure,
    "features": features,
    "ranks": ranks,
}
