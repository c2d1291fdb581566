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
from attnspan_lab.console import numbers, progress, stdout, words
from attnspan_lab.files import write_json
from attnspan_lab.tune.cache import cache_path, entries, tuned

__all__ = ["tune"]


def tune(
    target: Annotated[
        str, Argument(help='"triton", or module:function, a function that returns the arguments of a search')
    ] = "triton",
    dtypes: Annotated[str, Option(help="triton: element types, separated by commas")] = "bfloat16,float16",
    head_dims: Annotated[str, Option(help="triton: head dims, separated by commas")] = "64,128",
    seconds: Annotated[float, Option(min=0.01, help="time for each search, in seconds")] = 10.0,
    show: Annotated[bool, Option("--show", help="print the entries of the cache, and exit")] = False,
    json: Annotated[
        Path | None, Option(help="triton: write the times of all backends to this JSON file")
    ] = None,
) -> None:
    """Find the fastest configuration of a kernel on this machine, and cache it for later processes."""
    path = cache_path()
    print(f"cache: {path or 'off, results are not stored'}")
    if show:
        for entry in entries(path):
            print(f"{entry['key']['name']}: {entry['found']['config']}, {entry['found']['reason']}")
        return
    if target == "triton":
        _tune_triton(words(dtypes), numbers("--head-dims", head_dims), seconds, json)
        return
    module, _, name = target.partition(":")
    expect(name, "attnspan tune", "module:function", repr(target), "Write the function after a colon")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        got, remedy = str(error), "Run from the folder that holds the module"
        raise OptionError(target, expected="a function of a module", got=got, remedy=remedy) from None
    found = make()
    fits = isinstance(found, dict) and {"make_call", "configs", "default"} <= set(found)
    wanted = "a dict with make_call, configs and default"
    expect(fits, target, wanted, type(found).__name__, "Return the arguments of `search` as a dict")
    with progress(stdout(), 1, f"{target}, about {seconds:g} s") as tell:
        tell(_said(target, tuned(found.pop("name", target), seconds=seconds, **found)), advance=1)


def _said(name: str, found: Any) -> str:
    ratio = (
        found.ratio and f", speedup {found.ratio.median:.3f} [{found.ratio.low:.3f}, {found.ratio.high:.3f}]"
    )
    failed = f"{len(found.failures)} of {found.tried} failed"
    return f"{name}: {found.config}{ratio or ''}, {found.reason}; {failed}"


def _tune_triton(
    dtypes: tuple[str, ...], head_dims: tuple[int, ...], seconds: float, json: Path | None
) -> None:
    """Search block sizes of each kernel, then time all backends for each kind of call."""
    from attnspan_lab.tune.gpu import KERNELS, KINDS, blocks, capability_of_gpu, rank

    capability, times = capability_of_gpu(), []
    searches, kinds = (list(product(dtypes, head_dims, x)) for x in (KERNELS, KINDS))
    total = len(searches) + len(kinds)
    with suppress(KeyboardInterrupt), progress(stdout(), total) as tell:
        for dtype, dim, kernel in searches:
            name = f"triton {kernel} {dtype} D={dim} causal S=4096"
            tell(description=name)
            found = tuned(name, seconds=seconds, **blocks(kernel, dtype, dim, capability=capability))
            tell(_said(name, found), advance=1)
        for dtype, dim, kind in kinds:
            tell(description=f"backends: {kind} {dtype} D={dim}")
            nanoseconds, reasons = rank(kind, dtype, dim, seconds=seconds)
            tell(f"{kind} {dtype} D={dim}: {nanoseconds} {reasons or ''}", advance=1)
            times.append({"kind": kind, "dtype": dtype, "head_dim": dim, "nanoseconds": nanoseconds})
    if json is not None:
        write_json(json, times)
