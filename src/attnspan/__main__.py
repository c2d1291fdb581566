"""The command line ``python -m attnspan``: draw a mask, explain a call, print versions and settings.

The package attnspan-lab has more commands.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from shutil import get_terminal_size

from attnspan.base.machine import cpu_model, openmp_runtimes, settings, version_of
from attnspan.errors import expect

_PACKAGES = (
    "attnspan",
    "attnspan-lab",
    "numpy",
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "transformers",
    "diffusers",
)
_LAB = ("bench", "doctor", "simulate", "tune", "zoo")
_EXAMPLE = 'a mask, for example "causal & documents([0, 10, 32])" (all names: show --list)'
_FILES = ", a file (.npy, .npz, .safetensors, .pt), or module:function"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A user's error prints one message and gives exit code 2, without a traceback."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in _LAB:
        _fail(f"{given[0]} is a command of attnspan-lab: pip install ./lab in a checkout first")
    options = _parser().parse_args(given)
    try:
        options.run(options)
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed")
    except (ValueError, TypeError, OSError) as error:
        # The user can correct an error of attnspan. Any other error is a defect and keeps its traceback.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("attnspan."):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"attnspan: {message}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m attnspan", description="Exact attention with masks as data.")
    parser.add_argument("--version", action="version", version=f"attnspan {version_of('attnspan')}")
    commands = parser.add_subparsers(required=True, metavar="show | explain")
    show = commands.add_parser("show", help="draw a mask")
    show.set_defaults(run=_show)
    show.add_argument("mask", nargs="?", default="", help=_EXAMPLE + _FILES)
    show.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="for offsets of documents and FlashMask in a file",
    )
    show.add_argument(
        "--at", type=int, nargs=2, default=(0, 0), metavar=("BATCH", "HEAD"), help="element to draw (0 0)"
    )
    show.add_argument("--svg", type=Path, help="write an SVG picture to this file instead")
    show.add_argument("--list", action="store_true", help="print the names of all masks")
    explain = commands.add_parser(
        "explain", help="print the backend that runs a call, and why the others do not"
    )
    explain.set_defaults(run=_explain)
    explain.add_argument("mask", nargs="?", default="full", help=_EXAMPLE)
    explain.add_argument("--kv-heads", type=int, help="key heads (default: as many as query heads)")
    explain.add_argument("--head-dim", type=int, default=64, help="elements of a query (64)")
    explain.add_argument("--dtype", default="float32", help="element type of q, k and v (float32)")
    explain.add_argument("--device", default="cpu", help="device of torch (cpu)")
    explain.add_argument("--jax", action="store_true", help="explain a call of JAX instead of torch")
    explain.add_argument(
        "--env", action="store_true", help="print versions, machine and settings for a bug report, and exit"
    )
    for command in (show, explain):
        command.add_argument("--q-len", type=int, help="queries (default: from the mask's lists, else 64)")
        command.add_argument("--k-len", type=int, help="keys (default: as many as queries)")
        command.add_argument("--batch", type=int, default=1, help="batch size (1)")
        command.add_argument("--heads", type=int, default=1, help="query heads (1)")
    return parser


def _show(options: argparse.Namespace) -> None:
    from attnspan.library.text import names, parse
    from attnspan.masks import picture

    if options.list:
        print(*sorted(names()), sep="\n")
        return
    expect(options.mask, "show", "a mask", "none", 'Write a mask, for example "causal", or see --list')
    from attnspan.interchange import _files

    found, at = _files.find(options.mask, options.causal), tuple(options.at)
    if found is not None:
        options.q_len, options.k_len = options.q_len or found.q_len, options.k_len or found.k_len
        options.batch, options.heads = max(options.batch, found.batch), max(options.heads, found.heads)
    mask = parse(options.mask) if found is None else found.mask
    rows, keys = picture.implied_sizes(mask, options.q_len, options.k_len)
    inside = 0 <= at[0] < options.batch and 0 <= at[1] < options.heads
    expect(
        inside, "--at", "a batch element below --batch and a head below --heads", at, "Pass smaller numbers"
    )
    if options.svg is None:
        # Query numbers, a frame and the last key number stand next to the picture.
        width = max(min(64, get_terminal_size().columns - 14), 1)
        picture.show(mask, rows, keys, at=at, batch=options.batch, heads=options.heads, width=width)
        if found is not None:
            lowered = mask.spans(rows, keys, batch=options.batch, heads=options.heads).lowered
            print(f"{'kind':<13} {found.kind}", _files.report(lowered), sep="\n")
        return
    lowered = mask.spans(rows, keys, batch=options.batch, heads=options.heads).lowered
    options.svg.write_text(picture.svg(lowered, title=options.mask, at=at))
    print(options.svg)


def _explain(options: argparse.Namespace) -> None:
    if options.env:
        _environment()
        return
    from attnspan.library.text import parse
    from attnspan.masks import picture

    mask = parse(options.mask)
    rows, keys = picture.implied_sizes(mask, options.q_len, options.k_len)
    q = (options.batch, options.heads, rows, options.head_dim)
    k = (options.batch, options.kv_heads or options.heads, keys, options.head_dim)
    if options.jax:
        import jax.numpy as jnp

        from attnspan.jax import explain as explain_jax

        known, wanted = hasattr(jnp, options.dtype), "an element type of JAX"
        expect(known, "--dtype", wanted, options.dtype, "Try bfloat16")
        print(explain_jax(*(jnp.zeros(x, options.dtype) for x in (q, k, k)), mask=mask))
        return
    import torch

    from attnspan.torch import explain

    dtype = getattr(torch, options.dtype, None)
    expect(
        isinstance(dtype, torch.dtype), "--dtype", "an element type of torch", options.dtype, "Try bfloat16"
    )
    print(explain(*(torch.empty(x, dtype=dtype, device=options.device) for x in (q, k, k)), mask=mask))


def _environment() -> None:
    from attnspan.kernels import cpu

    facts = {"python": f"{platform.python_version()} on {platform.platform()}"}
    facts |= {name: version_of(name) or "not installed" for name in _PACKAGES}
    facts["CPU"] = f"{cpu_model()}, {os.cpu_count()} logical cores"
    if version_of("torch"):  # first, because the kernel then uses torch's threads
        import torch

        facts["threads"] = f"{torch.get_num_threads()} of torch"
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none that torch can use"
        facts["GPU"] = f"{gpu}, CUDA {torch.version.cuda or 'not in this build'}"
    levels = ", ".join(cpu.isa_levels()) if cpu.core else ""
    facts["CPU kernel"] = f"{cpu.isa()} of {levels}; {cpu.threading()}" if levels else "not built"
    runtimes = openmp_runtimes()
    if runtimes is not None:
        clash = " (they compete for the cores: keep one)" if len(runtimes) > 1 else ""
        facts["OpenMP"] = f"{', '.join(runtimes) or 'none'}{clash}"
    for name, text in (facts | settings()).items():
        print(f"{name:<12} {text}")


if __name__ == "__main__":
    main()
