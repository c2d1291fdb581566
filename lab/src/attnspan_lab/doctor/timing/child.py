"""Examines a benchmark in this process. Nothing is loaded and nothing else runs before the script."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

from attnspan_lab.children import telling
from attnspan_lab.doctor.timing.examine import examine_benchmark

__all__: list[str] = []


def _main(task: dict[str, Any]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(task["limit"] - 2.0, 1.0), exit=False)
    with telling(task["out"]) as say:
        say(begin="running")
        findings, facts = examine_benchmark(task["target"], task["arguments"], limit=task["limit"] / 3)
        for finding in findings:
            say(finding=finding)
        say(facts=facts)
        say(end=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)
