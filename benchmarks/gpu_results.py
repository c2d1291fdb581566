"""Check of results and gradients on a GPU: python benchmarks/gpu_results.py

Each backend is compared with `math` in float64. A line shows the backend's errors by norm, and the errors of
`math` in the call's own dtype. The most common calls come first, and each line is printed immediately.
`--device cpu` is a rehearsal with Triton's interpreter and FlexAttention's array code.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnspan import alibi, causal, documents, full, prefix, window
from attnspan.errors import BackendError
from attnspan.torch import attention

LENGTH, ENDS = 500, [0, 130, 131, 400, 500]
#: Errors of results and gradients may be this many times the errors of `math` in the dtype, which rounds only
#: results. Triton's interpreter truncates bfloat16, but a GPU rounds.
ALLOWED = {"cuda": 4.0, "cpu": 6.0}
MASKS: dict[str, Any] = {
    "causal": causal(),
    "full": full(),
    "documents": causal() & documents(ENDS),
    "window": causal() & window(100),
    "prefix": prefix(70),
}


def cases() -> Iterator[tuple[str, str, int, str, tuple[int, int], list[str]]]:
    """One case: backend, mask, head dim, dtype, heads, and names of options."""
    for name in MASKS:
        for backend in ("vendor", "flex", "triton"):
            yield backend, name, 128, "bfloat16", (8, 2), []
    for options in (["softcap"], ["sinks"], ["alibi"], ["softcap", "sinks", "alibi"]):
        for backend in ("flex", "triton"):
            yield backend, "documents", 128, "bfloat16", (8, 2), options
    others = ((64, "bfloat16"), (128, "float16"), (64, "float16"), (256, "bfloat16"), (64, "float32"))
    for dim, dtype in others:
        for name in ("causal", "documents"):
            for backend in ("vendor", "triton", "flex"):
                yield backend, name, dim, dtype, (4, 4), []


def results(inputs: list[Tensor], mask: Any, options: list[str], backend: str, dout: Tensor) -> list[Tensor]:
    heads, device = inputs[0].shape[1], inputs[0].device
    given: dict[str, Any] = {}
    if "softcap" in options:
        given["softcap"] = 5.0
    if "sinks" in options:
        given["sinks"] = torch.linspace(-1, 1, heads, device=device)
    if "alibi" in options:
        given["bias"] = alibi(torch.linspace(0.01, 0.1, heads, device=device))
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*leaves, mask=mask, backend=backend, **given)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def errors_of(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--first", type=int, help="run only this number of cases")
    parser.add_argument("--backend", help="run only this backend")
    asked = parser.parse_args()
    rehearsing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if asked.device == "cpu":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from eager_flex import eager

        from attnspan.experimental.triton import interpreted

        rehearsing = contextlib.ExitStack()
        rehearsing.enter_context(interpreted())
        rehearsing.enter_context(eager())
    wrong = 0
    chosen = [x for x in cases() if asked.backend in (None, x[0])]
    with rehearsing:
        for backend, name, dim, dtype, (heads, kv_heads), options in chosen[: asked.first]:
            began, n = time.perf_counter(), asked.length
            torch.manual_seed(0)
            kind = {"device": asked.device, "dtype": getattr(torch, dtype)}
            q, dout = (torch.randn(1, n, heads, dim, **kind).transpose(1, 2) for _ in range(2))
            k, v = (torch.randn(1, n, kv_heads, dim, **kind).transpose(1, 2) for _ in range(2))
            mask = MASKS[name] if n == LENGTH or name != "documents" else causal() & documents([0, n // 3, n])
            wanted = results([x.double() for x in (q, k, v)], mask, options, "math", dout)
            plain = errors_of(results([q, k, v], mask, options, "math", dout), wanted)
            label = f"{backend:7} {name:10} D={dim:<4} {dtype:9} {heads}/{kv_heads} {'+'.join(options):20}"
            try:
                found = results([q, k, v], mask, options, backend, dout)
                errors = errors_of(found, wanted)
            except BackendError as refusal:
                print(label, "refused:", str(refusal).splitlines()[0], flush=True)
                continue
            except Exception as failure:  # the next case may still run
                wrong += 1
                print(label, f"FAILED: {type(failure).__name__}: {str(failure)[:300]}", flush=True)
                continue
            right = all(a <= ALLOWED[asked.device] * b for a, b in zip(errors, plain, strict=True))
            wrong += not right
            pairs = zip(("out", "dq", "dk", "dv"), errors, plain, strict=True)
            shown = " ".join(f"{x}={a:.1e}/{b:.1e}" for x, a, b in pairs)
            seconds = f"{time.perf_counter() - began:.1f} s"
            print(label, "ok   " if right else "WRONG", shown, seconds, flush=True)
    print(f"{wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
