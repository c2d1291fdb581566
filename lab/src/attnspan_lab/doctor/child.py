"""One stage of an examination, run in this process. Findings go to the parent immediately."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from attnspan_lab.children import forked_task, telling
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, is_users, lines_of, lines_of_error
from attnspan_lab.doctor.words import counted, error_text, first_line

__all__: list[str] = []

_COMPILER = ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx")
# Errors of torch and JAX about a GPU that is missing.
_NO_GPU = re.compile(
    "not compiled with CUDA|requires CUDA support|without ATen_cuda|no NVIDIA (driver|GPU)|No CUDA GPUs|"
    "no CUDA-capable device|CUDA driver|no platforms that are instances of (cuda|gpu)"
)


def _main(given: dict[str, Any]) -> None:
    faulthandler.enable()
    loading = _loading()
    task = forked_task(given["folder"])  # From here on, each stage has a process of its own.
    # When the parent ends a process that hangs, its stderr then has the threads and frames.
    faulthandler.dump_traceback_later(max(task["limit"] - 2.0, 1.0), exit=False)
    with telling(task["out"]) as say:
        followed = threading.get_ident(), task["parent"], task["period"], say
        threading.Thread(target=_follow, args=followed, daemon=True).start()
        say(begin="loading")
        try:
            if loading is not None:
                raise loading
            from attnspan_lab.doctor.torch.subject import load

            subject = load(task["target"], task["arguments"])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            say(finding=_unloadable(error, task["target"]))
            say(end=True)
            return
        stages, loads, on_cpu = _kind_of(subject)
        title = f"{subject.title}, {counted(len(subject.batches), 'batch', 'batches')}"
        say(begin="running", subject=title, loads=loads, on_cpu=on_cpu)
        stages[task["stage"]](subject, say, task["backend"])
        say(end=True)
    sys.stdout.flush()


def _loading() -> BaseException | None:
    """Load torch and the doctor. Return the error if that fails."""
    try:
        import torch._dynamo

        import attnspan_lab.doctor.torch.stages
    except Exception as error:
        return error
    del attnspan_lab, torch
    return None


def _kind_of(subject: Any) -> tuple[Mapping[str, Callable[..., None]], Sequence[str], bool]:
    """Return the stages of a subject, modules that stages after the first one need, and if it is on CPU."""
    if type(subject).__module__.startswith("attnspan_lab.doctor.jax."):
        import jax

        from attnspan_lab.doctor.jax import STAGES as OF_JAX

        return OF_JAX, (), jax.default_backend() == "cpu"
    from attnspan_lab.doctor.torch.stages import STAGES

    return STAGES, _COMPILER, all(x.device.type == "cpu" for x in subject.model.parameters())


def _follow(thread: int, parent: int, period: float, say: Callable[..., None]) -> None:
    """Report the line that a thread runs. The doctor needs it after a crash that destroys the stack.

    The process ends if its parent ends, which ends with the doctor.
    """
    last: list[Place] = []
    with suppress(ValueError):  # The file is closed because the stage is done.
        while True:
            now = list(islice(lines_of(sys._current_frames().get(thread)), 3))
            if now and now != last:
                say(at=now)
                last = now
            if os.getppid() != parent:
                os._exit(1)
            time.sleep(period)


def _unloadable(error: BaseException, target: str) -> Finding:
    places = lines_of_error(error)[:3]
    is_ours = type(error).__module__.startswith(("attnspan.", "attnspan_lab."))
    said = (first_line if is_ours else error_text)(error, 300)
    is_script = target.endswith(".py")
    cause = "The script raises" if is_script else "The factory raises, or the import of its module does"
    remedy = f"Make sure that this works: {_test_of(target)}"
    if not is_script and ":" not in target:
        cause, remedy = "The library raises", "Install transformers and diffusers, or write a factory"
    if "deserialize object on a CUDA device" in str(error):
        cause = "The checkpoint holds tensors of a GPU, and torch sees no GPU on this machine"
        remedy = "Load it with torch.load(path, map_location='cpu')"
    elif _NO_GPU.search(str(error)):
        cause = "The factory needs a GPU, and torch sees none on this machine"
        remedy = "Choose the device with torch.cuda.is_available()"
    if isinstance(error, SyntaxError) and is_users(error.filename or "<"):
        places = [Place(str(error.filename), error.lineno or 1)]
        said, cause = f"{type(error).__name__}: {error.msg}", "Python cannot read this file"
        remedy = "Correct this line, or the line before it"
    elif hasattr(error, "problem"):  # An error of `attnspan_lab.doctor.unfit`, which loads after torch.
        said, remedy, cause = error.problem, getattr(error, "remedy", ""), "The doctor cannot use this target"
        places = []
    what = f"{target} cannot be examined: {said}"
    return Finding("subject", what, tuple(places), (), cause, remedy, stage="loading")


def _test_of(target: str) -> str:
    """Write a command that loads a target without the doctor."""
    module, _, name = target.rpartition(":")
    if not module:
        return f"python {target}"
    folder, _, file = module.rpartition("/")
    module = file.removesuffix(".py") if module.endswith(".py") else module
    path = f"PYTHONPATH={folder} " if folder else ""
    return f"{path}python -c 'import {module}; {module}.{name}()'"


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
    # Threads that a factory started and that never end must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)
