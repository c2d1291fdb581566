"""Architectures of transformers that fail with an attention, as factories; and what ails them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from attnspan_lab.zoo.measure import SOURCES, collect
from attnspan_lab.zoo.plan import TOKENS


class Fault(NamedTuple):
    """What the doctor has to find first.

    Args:
        attention: That the architecture is made with.
        layout: Of its batches.
        kind: Of the first finding.
        line: A part of the line that it names.
        stages: In which it shows.
    """

    attention: str
    layout: str
    kind: str
    line: str
    stages: tuple[str, ...] = ("eager",)


#: Scores are stored where torch's function cannot be chosen; FlexAttention has no backward pass on CPUs,
#: crashes on a score_mod of transformers' own, and its masks do not compile.
FAULTS = {
    "gemma2": Fault("eager", "packed", "unfused", "softmax(attn_weights"),
    "vaultgemma": Fault("eager", "packed", "unfused", "softmax(attn_weights"),
    "mimo_v2_flash": Fault("eager", "packed", "unfused", "softmax(attn_weights"),
    "gpt_oss": Fault("eager", "padded", "unfused", "softmax(combined_logits"),
    "t5gemma": Fault("eager", "padded", "unfused", "softmax(attn_weights"),
    "nllb-moe": Fault("eager", "padded", "unfused", "softmax(attn_weights"),
    "granite_swa": Fault("eager", "packed", "unfused", "softmax(attn_weights"),
    "doge": Fault("flex", "packed", "crash", "flex_attention_compiled("),
    "llama": Fault("flex", "packed", "graph-break", "create_block_mask(", ("compiled",)),
    "bert": Fault("flex", "padded", "graph-break", "fast_all(attention_mask)", ("compiled",)),
}


def _made(name: str) -> tuple[Any, list[Any]]:
    fault = FAULTS[name]
    architecture = next(x for x in collect(SOURCES) if x.name == name)
    batches = [architecture.batch(fault.layout, n, "tiny") for n in TOKENS]
    return architecture.make(fault.attention, "tiny"), batches


def __getattr__(name: str) -> Callable[[], Any]:
    if name.replace("__", "-") not in FAULTS:
        raise AttributeError(name)
    return partial(_made, name.replace("__", "-"))
