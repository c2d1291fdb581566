"""The command ``attnspan tune``."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from attnspan.errors import OptionError, expect
from attnspan_lab.console import numbers, words
from attnspan_lab.files import write_json
from attnspan_lab.tune.cache import cache_path, entries, tuned

__all__ = ["tune"]


def tune(
    target: Annotated[
        str, Argument(help="module:function, which returns the arguments of a search; or triton")
    ] = "triton",
    dtypes: Annotated[str, Option(help="triton: element types, separated by commas")] = "bfloat16,float16",
    head_dims: Annotated[str, Option(help="triton: head dims")] = "64,128",
    seconds: Annotated[float, Option(min=0.01, help="time for each search, s")] = 10.0,
    show: Annotated[bool, Option("--show", help="print what is in the cache, and stop")] = False,
    json: Annotated[Path | None, Option(help="triton: file for times of all backends")] = None,
) -> None:
    """Find the fastest configuration of a kernel on this machine, and keep it for later processes."""
    path = cache_path()
    print(f"cache: {path or 'off, nothing is written'}")
    if show:
        for entry in entries(path):
            print(f"{entry['key']['name']}: {entry['found']['config']}, {entry['found']['reason']}")
        return
    if target == "triton":
        _tune_triton(words(dtypes), numbers("--head-dims", head_dims), seconds, json)
        return
    module, _, name = target.partition(":")
    expect(name, "attnspan tune", "module:function", repr(target), "Name the function after a colon")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        got, remedy = str(error), "Run from the folder that holds the module"
        raise OptionError(target, expected="a function of a module", got=got, remedy=remedy) from None
    found = make()
    fits = isinstance(found, dict) and {"make_call", "configs", "default"} <= set(found)
    wanted = "a dict with make_call, configs and default"
    expect(fits, target, wanted, type(found).__name__, "Return what `search` takes")
    _say(target, tuned(found.pop("name", target), seconds=seconds, **found))


def _say(name: str, found: Any) -> None:
    ratio = (
        found.ratio
        and f", {found.ratio.median:.3f} times as fast [{found.ratio.low:.3f}, {found.ratio.high:.3f}]"
    )
    print(
        f"{name}: {found.config}{ratio or ''}, {found.reason}; {len(found.failures)} of {found.tried} failed",
        flush=True,
    )


def _tune_triton(
    dtypes: tuple[str, ...], head_dims: tuple[int, ...], seconds: float, json: Path | None
) -> None:
    """Search the blocks of each kernel, then time all backends for each kind of call."""
    from attnspan_lab.tune.gpu import KERNELS, KINDS, blocks, capability_of_gpu, rank

    capability, times = capability_of_gpu(), []
    with suppress(KeyboardInterrupt):
        for dtype, dim, kernel in product(dtypes, head_dims, KERNELS):
            name = f"triton {kernel} {dtype} D={dim} causal S=4096"
            _say(name, tuned(name, seconds=seconds, **blocks(kernel, dtype, dim, capability=capability)))
        for dtype, dim, kind in product(dtypes, head_dims, KINDS):
            nanoseconds, reasons = rank(kind, dtype, dim, seconds=seconds)
            print(f"{kind} {dtype} D={dim}: {nanoseconds} {reasons or ''}", flush=True)
            times.append({"kind": kind, "dtype": dtype, "head_dim": dim, "nanoseconds": nanoseconds})
    if json is not None:
        write_json(json, times)
