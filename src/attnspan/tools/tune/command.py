"""The command ``attnspan tune``."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated, Any

from typer import Option

from attnspan.errors import expect
from attnspan.kernels import measured
from attnspan.kernels.tuned import Key, cache_path, read

__all__ = ["tune"]


def tune(
    dtypes: Annotated[str, Option(help="element types, separated by commas")] = "float32,bfloat16",
    head_dims: Annotated[str, Option(help="head dims")] = "64,128",
    lengths: Annotated[str, Option(help="numbers of keys")] = "512,1024,2048,4096,8192",
    masks: Annotated[str, Option(help="kinds of masks")] = "dense,half,sparse,decode",
    modes: Annotated[str, Option(help="directions")] = "forward,backward",
    seconds: Annotated[float, Option(min=0.01, help="time for each kind of call, s")] = 4.0,
    minutes: Annotated[float, Option(min=0.01, help="time for all; the next run continues")] = 12.0,
    show: Annotated[bool, Option("--show", help="print what is in use, and stop")] = False,
    device: Annotated[str, Option(help="cpu, or cuda: Triton's blocks, and the fastest backend")] = "cpu",
) -> None:
    """Tune the CPU kernel, or what runs on the GPU, on this machine."""
    if device == "cuda":
        _tune_gpu(dtypes, head_dims, seconds, minutes, show)
        return
    expect(device == "cpu", "--device", "cpu or cuda", repr(device), "Name one of the two")
    from attnspan.tools.tune.cases import grid
    from attnspan.tools.tune.cpu import CpuBackend
    from attnspan.tools.tune.run import run

    cases, backend = grid(dtypes, head_dims, lengths, masks, modes), CpuBackend()
    path, done, gained = cache_path(backend.device), 0, 0
    print(f"{backend.device}; cache: {path or 'off, nothing is written'}")
    if show:
        print(*map(_line, read(path, backend.device) if path else []), sep="\n")
        return
    with suppress(KeyboardInterrupt):
        for entry in run(backend, cases, path, seconds=seconds, minutes=minutes):
            print(_line(entry), flush=True)
            done, gained = done + 1, gained + any(entry["config"].values())
    print(f"{gained} of {done} kinds of calls gained; {len(cases) - done} left for the next run")


def _tune_gpu(dtypes: str, head_dims: str, seconds: float, minutes: float, show: bool) -> None:
    from attnspan.console import numbers, words
    from attnspan.tools.tune.gpu import TritonBackend, blocks_grid, rankings
    from attnspan.tools.tune.run import run, save

    backend, kinds, dims = TritonBackend(), list(words(dtypes)), list(numbers("--head-dims", head_dims))
    path, end = cache_path(backend.device), time.monotonic() + 60 * minutes
    print(f"{backend.device}; cache: {path or 'off, nothing is written'}")
    if show:
        print(*map(_line, read(path, backend.device) if path else []), sep="\n")
        return
    with suppress(KeyboardInterrupt):
        # Half of the time for blocks, which the ranking then has.
        cases = blocks_grid(kinds, dims)
        each = max(seconds, 30 * minutes / max(len(cases), 1))
        for entry in run(backend, cases, path, seconds=each, minutes=minutes / 2):
            print(_line(entry), flush=True)
        measured.forget()
        for entry in rankings(backend.device, backend.isa, kinds, dims, seconds=seconds):
            if path:
                save(path, backend.device, entry)
            print(_line(entry), flush=True)
            if time.monotonic() > end:
                print("out of time: the remaining kinds of calls keep their old entries")
                return


def _line(entry: dict[str, Any]) -> str:
    chosen, ratio = [f"{name}={value}" for name, value in entry["config"].items() if value], ""
    with suppress(KeyError, TypeError, ValueError):  # no ratio, or a file that was edited
        ratio = ", {median:.3f} times as fast [{low:.3f}, {high:.3f}]".format(**entry["ratio"])
    return f"{Key(**entry['key'])}: {' '.join(chosen) or 'default'}{ratio}, {entry.get('reason')}"
