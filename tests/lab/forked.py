"""Processes of the doctor and the zoo that are forked from one that has loaded torch and its compiler."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from worlds import preload

preload("attnspan_lab.doctor.torch.stages", "attnspan_lab.zoo.measure", "torch._dynamo")


class Forked:
    """What `children` takes of `subprocess.Popen`, without the seconds that an interpreter needs to start."""

    def __init__(
        self, command: list[str], *, stderr: Any, env: Mapping[str, str], said: str = os.devnull, **_: Any
    ) -> None:
        _, _, module, task = command
        arguments = module, task, said, stderr.name, dict(env), os.getcwd()
        self._process = get_context("forkserver").Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("", seconds or 0.0)
        return self._process.exitcode


def run(
    command: list[str], *, env: Mapping[str, str], timeout: float | None, **_: Any
) -> subprocess.CompletedProcess[str]:
    """The same for `subprocess.run`, with what the process writes."""
    with NamedTemporaryFile("r") as out, NamedTemporaryFile("r") as errors:
        code = Forked(command, stderr=errors, env=env, said=out.name).wait(timeout)
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


def _run(module: str, task: str, out: str, errors: str, variables: dict[str, str], folder: str) -> None:
    os.setsid()
    for stream, path in enumerate((os.devnull, out, errors)):
        os.dup2(os.open(path, os.O_RDWR), stream)
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = [folder, *variables.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv[1:] = [task]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
