"""Findings of the doctor, with evidence, cause and remedy, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from attnspan_lab.doctor.places import Place

__all__ = [
    "KINDS",
    "Diagnosis",
    "Finding",
    "Kind",
    "merged",
]


class Kind(NamedTuple):
    """Severity of a kind of finding, with its usual cause and remedy."""

    severity: str
    cause: str = ""
    remedy: str = ""


#: Kinds of findings, the most severe first: what keeps the doctor from looking, wrong results, failures of
#: the compiler, lost time and memory.
KINDS = {
    "subject": Kind("stops"),
    "hang": Kind(
        "stops",
        "It waits for something, or the model is too large for an examination",
        "Give the doctor a smaller model and few short batches, or more time by --limit",
    ),
    "crash": Kind("stops", remedy="Run the named stage alone under a debugger: this line was being executed"),
    "error": Kind(
        "stops",
        "It does so without the compiler",
        "Run this step by itself; the doctor looks at models that run",
    ),
    "hidden-rows": Kind(
        "wrong",
        "The mask hides every key of these rows. Softmax of nothing but -inf is 0/0; of equal large negative "
        "numbers it is uniform",
        "Let such rows see themselves, or use attnspan, which returns 0 for them",
    ),
    "nan": Kind(
        "wrong",
        "Its inputs have no NaN: it is inf - inf, 0 / 0, 0 * inf, or a root or logarithm of a number below 0",
        "Look at the range of this line's inputs, or at a division by a sum that can be 0",
    ),
    "leak": Kind(
        "wrong",
        "No mask that separates documents reaches this call",
        "Pass one: mask=causal() & segments(ids) of attnspan, or flash-attn's cu_seqlens",
    ),
    "mask-lost": Kind(
        "wrong",
        "The batch has a mask of padding, and this call does not get it",
        "Pass the mask on; in transformers register a mask function next to the attention function",
    ),
    "causality-lost": Kind(
        "wrong",
        "The call has no causal mask: is_causal was not passed on, or the mask that held causality is None",
        "Pass is_causal=True or mask=causal(); in transformers register a mask function too",
    ),
    "rank-rows": Kind(
        "wrong",
        "What a rank's rows may see was sharded by other rules than the rows",
        "Shard everything by one Layout: layout.shard(batch, rank), mask=plan.on(mesh, rows=batch)",
    ),
    "rank-placement": Kind(
        "wrong",
        "They are sharded along different dimensions: attention cannot be computed on the parts of one rank",
        "Shard q, k and v alike, or share rows by a plan: mask=plan.on(mesh, rows=batch)",
    ),
    "rank-graphs": Kind(
        "wrong",
        "Ranks compile different programs, so that a collective can wait for one that never comes",
        "Keep what the compiler guards on the same on all ranks: sizes, numbers, branches on the rank",
    ),
    "operator": Kind(
        "wrong",
        "Compiled code is written for the shapes, strides and dtypes of the fake kernel",
        "Register a fake kernel that returns exactly these, empty; torch.library.opcheck tests it",
    ),
    "parity": Kind(
        "wrong",
        "Compiled code computes something else than the module does in eager mode",
        "Look for what the compiler cannot see: hidden mutation, a branch on is_compiling(), an operator "
        "whose declared mutations or gradients are wrong",
    ),
    "combination": Kind(
        "compile",
        "Each of these features works; together they do not",
        "Leave one of them out, or change their order",
    ),
    "compile-error": Kind("compile", remedy="Compile the parts around this line, or replace it"),
    "recompile-limit": Kind("compile"),
    "graph-break": Kind("compile", remedy="Move this line out of the compiled part"),
    "recompile": Kind("compile"),
    "unfused": Kind(
        "slow",
        "A product, a softmax and a second product store a tensor (heads, Sq, Sk) between them",
        "Call F.scaled_dot_product_attention or attnspan.torch.attention instead of these lines",
    ),
    "dense-mask": Kind(
        "slow",
        "Its memory and the time to make it grow with the square of the length; fused kernels read all of it",
        "Say what it means: is_causal=True, or mask=causal() & segments(ids) of attnspan; for positions "
        "bias=alibi(slopes) or relative(table)",
    ),
    "kv-copy": Kind(
        "slow",
        "repeat_kv, repeat_interleave, or expand with a reshape after it",
        "Pass the shared heads as they are: enable_gqa=True, or attnspan.torch.attention without a flag",
    ),
    "copy": Kind(
        "slow",
        ".contiguous() before a kernel that takes strides",
        "Remove it: fused kernels take transposed views",
    ),
    "upcast": Kind(
        "slow",
        "A tensor was converted, or met a float32 tensor and was promoted",
        "Convert to the model's dtype before attention, as rotary embeddings should",
    ),
    "recompute": Kind(
        "slow",
        "The backward pass repeats the forward pass of the checkpointed part, attention included",
        "Save attention's output: create_selective_checkpoint_contexts with its operator",
    ),
    "sync": Kind(
        "slow",
        ".item(), bool(x), or a size that data decide: a device finishes all work before the host goes on",
        "Keep the value in a tensor, or compute it once per step where the batch is made",
    ),
    "environment": Kind("note"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        kind: One of `KINDS`.
        what: What happens, in a sentence.
        cause: Why; by default what the kind says.
        remedy: What to do about it; by default what the kind says.
        places: Lines of the user's code, the most telling first.
        evidence: Figures and lines of output.
        tried: What the doctor changed to test the remedy, and what came of it.
        known: Reports of the same upstream.
        count: How often it was seen.
        stage: Where: "eager", "compiled", "parity", "ranks", ...
    """

    kind: str
    what: str
    places: tuple[Place, ...] = ()
    evidence: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""
    tried: str = ""
    known: tuple[str, ...] = ()
    count: int = 1
    stage: str = ""

    def __post_init__(self) -> None:
        for name in ("cause", "remedy"):
            object.__setattr__(self, name, getattr(self, name) or getattr(KINDS[self.kind], name))

    @property
    def severity(self) -> str:
        """One of "stops", "wrong", "compile", "slow" and "note"."""
        return KINDS[self.kind].severity

    @property
    def label(self) -> tuple[str, str]:
        """Its kind and line; where no line is known, what happens."""
        return self.kind, str(self.places[0]) if self.places else self.what

    @property
    def fails(self) -> bool:
        """Whether it is more than a cost."""
        return self.severity in ("stops", "wrong", "compile")


@dataclass(frozen=True)
class Diagnosis:
    """All that one examination found.

    Args:
        subject: What was examined.
        findings: The most severe first.
        facts: Figures by stage: graphs, compilations, calls of attention, times.
        environment: Machine and versions.
        cells: Of the matrix of features, if it was run: features, and "" or what failed.
        seconds: That all of it took.
        complete: False if it was interrupted.
    """

    subject: str
    findings: tuple[Finding, ...] = ()
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    cells: tuple[dict[str, str], ...] = ()
    seconds: float = 0.0
    complete: bool = True


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each kind, cause and line, the most severe first; of equals, the one seen first."""
    found: dict[tuple[Any, ...], Finding] = {}
    for x in findings:
        key = (x.kind, x.cause, x.places[:1] or x.what)
        same = found.get(key)
        found[key] = replace(same, count=same.count + x.count) if same else x
    order = list(KINDS)
    return tuple(sorted(found.values(), key=lambda x: order.index(x.kind)))
