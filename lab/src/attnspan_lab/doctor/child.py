"""One stage of an examination, in this process; what it finds is told to the parent at once."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from attnspan_lab.children import telling
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, lines_in, lines_of

__all__: list[str] = []


def _main(task: dict[str, Any]) -> None:
    # Threads and frames where a process hangs are in its errors when the parent ends it.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(task["limit"] - 2.0, 1.0), exit=False)
    with telling(task["out"]) as say:
        threading.Thread(
            target=_follow, args=(threading.get_ident(), task["period"], say), daemon=True
        ).start()
        say(begin="loading")
        try:
            from attnspan_lab.doctor.subject import load

            subject = load(task["target"], task["arguments"])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            say(finding=_unloadable(error, task["target"]))
            say(end=True)
            return
        say(begin="running", subject=f"{type(subject.model).__name__}, {len(subject.batches)} batches")
        from attnspan_lab.doctor.stages import STAGES

        STAGES[task["stage"]](subject, say, task["backend"])
        say(end=True)
    sys.stdout.flush()


def _follow(thread: int, period: float, say: Callable[..., None]) -> None:
    """Tell which line a thread runs. After a crash that destroys the stack, the parent still has a line."""
    last: list[Place] = []
    with suppress(ValueError):  # The file is closed: the stage is done.
        while True:
            now = list(islice(lines_of(sys._current_frames().get(thread)), 3))
            if now and now != last:
                say(at=now)
                last = now
            time.sleep(period)


def _unloadable(error: BaseException, target: str) -> Finding:
    text = str(error).strip().splitlines() or [""]
    places = lines_in("".join(traceback.format_exception(error)))
    remedy = "Make the factory return (model, batches) by itself: python -c 'import m; m.factory()'"
    cause = "The factory, or the import of its module, raises"
    if any(x in str(error) for x in ("CUDA", "NVIDIA", "cuda")):
        cause, remedy = (
            "It needs a GPU, and this machine has none",
            "Choose the device by torch.cuda.is_available()",
        )
    if type(error).__module__.startswith("attnspan."):
        cause, remedy = "The doctor cannot use it", text[0].rpartition(". ")[2]
    what = f"{target} cannot be examined: {type(error).__name__}: {text[0][:300]}"
    return Finding("subject", what, tuple(places[:3]), (), cause, remedy, stage="loading")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
    # What a factory started, such as threads that never end, does not keep the process.
    sys.stderr.flush()
    os._exit(0)
