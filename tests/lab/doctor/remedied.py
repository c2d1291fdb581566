"""Sick models with code of their remedies applied, for each kind of finding that has such code.

`REMEDIED` has the kind, the stage that finds it, the sick factory, a part of the remedy, and the mended one.
`RIGHT` has a factory of right results: the sick one if the finding is only a cost.
"""

from functools import partial
from typing import Any

import causes
import decoders
import missed
import patients
import torch
import torch.nn.functional as F
from missed import SDPA, model_of
from patients import CAUSAL, DIM, HEADS, LENGTH, Block, Model, attnspan_attention, fused, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan import causal

REMEDIED: dict[str, tuple[str, str, Any, str, Any]] = {}
RIGHT: dict[str, Any] = {}


def remedied(
    kind: str, name: str, sick: Any, said: str, well: Any, right: Any = None, stage: str = "eager"
) -> None:
    REMEDIED[f"{kind}: {name}"] = kind, stage, sick, said, well
    RIGHT[f"{kind}: {name}"] = right or sick


def plain(attend: Any, block: Any = Block) -> Any:
    """Make a factory of a model that may see later tokens."""
    return lambda: (Model(attend, block=block), tokens(), {})


EARLIER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
IDS = torch.arange(LENGTH).expand(2, -1) // 9
SAME_DOCUMENT = (IDS[:, None, :, None] == IDS[:, None, None]) & EARLIER
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


# Wrong pairs


def documents(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True)


def exact_documents(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=SAME_DOCUMENT)


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=EARLIER | EARLIER.roll(-1, 0))


def inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, attn_mask=EARLIER.mT)


class Convolved(Block):
    """A convolution that sees the next token, or only earlier ones."""

    padding = (1, 1)

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.mix = nn.Conv1d(DIM, DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(F.pad(x.mT, self.padding)).mT)


class CausalConvolved(Convolved):
    padding = (2, 0)


remedied(
    "leak",
    "no mask",
    lambda: (Model(documents), tokens(segment_ids=IDS), CAUSAL),
    "mask=causal() & segments(segment_ids)",
    lambda: (Model(patients.of_segments), tokens(segment_ids=IDS), CAUSAL),
    lambda: (Model(exact_documents), tokens(segment_ids=IDS), CAUSAL),
)
remedied(
    "leak",
    "kept by length",
    missed.PAIRS["kept"][1],
    "keep it by these values",
    missed.PAIRS["kept"][2],
    missed.PAIRS["kept"][2],
)
for attend in (shifted, inverted):
    right = model_of(lambda q, k, v: SDPA(q, k, v, attn_mask=EARLIER))
    remedied("causality-lost", attend.__name__, model_of(attend), "is_causal=True", model_of(fused), right)
convolved, after = model_of(fused, block=Convolved), model_of(fused, block=CausalConvolved)
remedied("causality-lost", "convolution", convolved, "pad a convolution on the left", after, after)


# Random numbers


class Unlisted(Block):
    """Dropout in a list, which the module does not know, or in a list of modules."""

    kind: Any = list

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.drops = self.kind([nn.Dropout(0.3)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drops[0](x))


class Known(Unlisted):
    kind = nn.ModuleList


class Trained(Block):
    """Dropout with a probability that depends on the mode."""

    always = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, training=self.always or self.training))


class Always(Trained):
    always = True


class OwnNumbers(Block):
    """Random numbers of a generator in a checkpoint, or drawn before it."""

    early = False

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=self.generator) > 0.3

    def part(self, x: Tensor, kept: Tensor | None) -> Tensor:
        return super().forward(x * (self.draw(x) if kept is None else kept))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, self.draw(x) if self.early else None, use_reentrant=False)


class DrawnBefore(OwnNumbers):
    early = True


in_eval = model_of(fused)
remedied(
    "dropout-in-eval",
    "in a list",
    model_of(fused, block=Unlisted),
    "nn.ModuleList",
    model_of(fused, block=Known),
    in_eval,
)
remedied(
    "dropout-in-eval",
    "always",
    model_of(fused, block=Always),
    "self.training",
    model_of(fused, block=Trained),
    in_eval,
)
remedied(
    "recompute-random",
    "own generator",
    model_of(fused, block=OwnNumbers),
    "draw before checkpoint",
    model_of(fused, block=DrawnBefore),
)
remedied(
    "recompute-random",
    "not restored",
    missed.PAIRS["forgets inputs"][1],
    "preserve_rng_state=False",
    missed.PAIRS["forgets inputs"][2],
)


# Positions


class Placed(Model):
    """Positions that the caller may give."""

    restarts = False

    def __init__(self) -> None:
        super().__init__(patients.of_segments)
        self.position = nn.Embedding(LENGTH, DIM)

    def forward(self, input_ids: Tensor, segment_ids: Tensor, position_ids: Any = None) -> Tensor:
        index = torch.arange(input_ids.shape[1])
        if self.restarts:
            starts = torch.ones_like(segment_ids, dtype=torch.bool)
            starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
            index = index - torch.where(starts, index, 0).cummax(-1).values
        x = self.embed(input_ids) + self.position(index if position_ids is None else position_ids)
        return self.head(self.blocks[0](x, segment_ids=segment_ids))


class Unplaced(Placed):
    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, segment_ids)


class Restarted(Unplaced):
    restarts = True


class Lengthy(Placed):
    """A factor that depends on the length of a row, or on the length of a document."""

    of_row = True

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:  # type: ignore[override]
        same = segment_ids[:, :, None] == segment_ids[:, None]
        size = same.sum(-1, keepdim=True) if not self.of_row else torch.tensor(input_ids.shape[1])
        return self.head(self.blocks[0](self.embed(input_ids) * size.log(), segment_ids=segment_ids))


class Short(Lengthy):
    of_row = False


def packed(model: Any, **more: Any) -> Any:
    return lambda: (model(), tokens(segment_ids=IDS, **more), CAUSAL)


INDEX = torch.arange(LENGTH).expand(2, -1)
again = packed(Placed, position_ids=INDEX - IDS * 9)
remedied("positions", "not given", packed(Placed), "Pass position_ids", again, again)
remedied("positions", "made", packed(Unplaced), "torch.where(starts, index, 0)", packed(Restarted), again)
remedied("positions", "length", packed(Lengthy), "length of each document", packed(Short), packed(Short))


# Gradients


def halved(x: Tensor) -> Tensor:
    return torch.ops.causes.halved_with_gradient(x)


causes._LIBRARY.define("halved_with_gradient(Tensor x) -> Tensor")
causes._LIBRARY.impl("halved_with_gradient", lambda x: x.detach() * 0.5, "CPU")
torch.library.register_fake("causes::halved_with_gradient", torch.empty_like, lib=causes._LIBRARY)
torch.library.register_autograd(
    "causes::halved_with_gradient", lambda _, grad: grad * 0.5, lib=causes._LIBRARY
)


class HalvedWell(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 0.5


def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(torch.tensor(q), k, v, is_causal=True)


def inferred(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        q = q * 0.5
    return SDPA(q.clone(), k, v, is_causal=True)


def halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q * 0.5, k, v, is_causal=True)


CUT = {
    "detach": (causes.detached, "Remove detach()", fused),
    "no_grad": (causes.untracked, "out of torch.no_grad()", lambda q, k, v: fused(q * 0.5 + 1, k, v)),
    "inference_mode": (inferred, "out of torch.inference_mode()", halves),
    "operator": (causes.without_backward, "register_autograd", lambda q, k, v: fused(halved(q), k, v)),
    "backward": (causes.drops, "Return a gradient", lambda q, k, v: fused(HalvedWell.apply(q), k, v)),
    "function": (copied, "x.clone()", lambda q, k, v: fused(q.clone(), k, v)),
}
for name, (sick, said, well) in CUT.items():
    right = halves if name in ("inference_mode", "operator", "backward") else well
    remedied("no-gradient", name, model_of(sick), said, model_of(well), model_of(right))


# Operators

patients._FLASH.define("flash_attention_well(Tensor q, Tensor k, Tensor v) -> Tensor")
patients._FLASH.impl("flash_attention_well", patients._flash, "CPU")
torch.library.register_fake(
    "patients::flash_attention_well",
    lambda q, *_: q.new_empty(q.transpose(1, 2).shape).transpose(1, 2),
    lib=patients._FLASH,
)


def well_strides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.patients.flash_attention_well(q.detach(), k.detach(), v.detach())


for sick in (patients.sick_strides, patients.sick_no_fake):
    remedied("operator", sick.__name__, sick, "Register a fake kernel", model_of(well_strides))


# Costs


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v


def written_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v


def written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", ((q * 0.2) @ k.mT * 0.5).softmax(-1), v)


def written_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attnspan_attention(q, k, v, mask=causal(), sinks=torch.zeros(HEADS), scale=1.0)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v


UNFUSED = {
    "without a scale": (
        written,
        "(q, k, v, is_causal=True, scale=1)",
        partial(SDPA, is_causal=True, scale=1.0),
    ),
    "with the usual scale": (written_scaled, "(q, k, v, is_causal=True)", partial(SDPA, is_causal=True)),
    "with two scales": (
        written_before,
        "(q, k, v, scale=0.5)",
        lambda q, k, v: SDPA(q * 0.2, k, v, scale=0.5),
    ),
    "softcap": (capped, "softcap=", lambda q, k, v: attnspan_attention(q, k, v, softcap=5.0, scale=1.0)),
}
for name, (sick, said, well) in UNFUSED.items():
    remedied("unfused", name, plain(sick), said, plain(well))
remedied("unfused", "sinks", patients.sick_sinks, "sinks=(your sinks), scale=1", model_of(written_sinks))
multihead, unweighted = (plain(fused, x) for x in (missed.Multihead, missed.MultiheadFused))
remedied("unfused", "multihead", multihead, "need_weights=False", unweighted)
remedied("kv-copy", "repeat_kv", patients.sick_repeat_kv, "enable_gqa=True", patients.well_shared_heads)
remedied("copy", "contiguous", patients.sick_contiguous, "Remove the copy", model_of(fused))
remedied("upcast", "rotary", patients.sick_upcast, "Convert q, k and v", patients.well_half)
remedied(
    "upcast",
    "softmax",
    causes.model_of(causes.wide_softmax, torch.bfloat16),
    "F.scaled_dot_product_attention",
    causes.model_of(lambda q, k, v: SDPA(q, k, v, is_causal=True, scale=1.0), torch.bfloat16),
)


class Saved(Block):
    """Attention's results are saved, with the operator that the remedy names."""

    operator: Any = FLASH

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [self.operator])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts, **given)


class SavedOurs(Saved):
    operator = torch.ops.attnspan.attention.default


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


ours = partial(attnspan_attention, mask=causal())
for name, block in (("torch", patients.Checkpointed), ("reentrant", Reentrant)):
    remedied(
        "recompute", name, model_of(fused, block=block), f"[torch.ops.{FLASH}]", model_of(fused, block=Saved)
    )
remedied(
    "recompute",
    "attnspan",
    model_of(ours, block=patients.Checkpointed),
    "[torch.ops.attnspan.attention.default]",
    model_of(ours, block=SavedOurs),
)


def keeps_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.detach().abs().mean(dim=(0, 2, 3))
    return SDPA(q / (1 + scale[0]), k, v, is_causal=True)


def keeps_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q / (1 + q.detach().abs().mean()), k, v, is_causal=True)


def counts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True) + (q.detach() > 1e9).sum()


def selects(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return SDPA(q, k, v, is_causal=True) + torch.where(q.detach() > 1e9, q, 0.0).sum()


def asserts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch._assert_async(q.abs().max() <= 1e4)
    return SDPA(q, k, v, is_causal=True)


SYNC = {
    "listed": (model_of(missed.listed), keeps_value),
    "numbered": (model_of(missed.numbered), keeps_number),
    "nonzero": (model_of(missed.nonzero), counts),
    "selected": (model_of(missed.selected), selects),
    "raises": (patients.sick_reads, asserts),
}
for name, (sick, well) in SYNC.items():
    remedied("sync", name, sick, "keep it in a tensor", model_of(well))


# Decoding

_POSITIONS, _STATE, _CAT = (
    decoders.DECODE["positions inside"],
    decoders.STATE["growing cache"],
    decoders.CATS["inside"],
)
_PREFILL = decoders.made(decoders.ByArgument, learned=True)
remedied("decode", "positions", _POSITIONS[1], "torch.arange(past", _POSITIONS[3][0], _PREFILL)
remedied("state", "cache", _STATE[2], "Empty it at the start", _STATE[3][0], decoders.stacked(decoders.Kept))
remedied("cache-cat", "cache", _CAT[1], "write in place", _CAT[2][0])


# The compiler


class Counted(Block):
    """Counts its calls in a buffer."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 / (1 + self.calls))


class Filled(Block):
    """Keeps results in one tensor of fixed size, instead of a list."""

    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.register_buffer("kept", torch.zeros(8, 2, LENGTH, DIM))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.count
        with torch.no_grad():
            self.kept.index_copy_(0, self.count[None], out.detach()[None])
            self.count += 1
        return out


def counted(block: Any, many: int) -> Any:
    return lambda: (Model(fused, block=block), tokens((LENGTH,) * many), CAUSAL)


remedied(
    "recompile", "counter", counted(patients.Counting, 4), "a buffer", counted(Counted, 4), stage="compiled"
)
remedied(
    "recompile",
    "list",
    missed.counting(missed.Listed),
    "one tensor of fixed size",
    counted(Filled, 6),
    stage="compiled",
)
remedied(
    "compile-error",
    "context_fn",
    patients.sick_nested,
    "functools.partial(create_selective_checkpoint_contexts",
    model_of(fused, block=Saved),
    stage="compiled",
)
