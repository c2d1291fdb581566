"""Sick models whose steps draw random numbers, lose gradients, or repeat and keep what they should not."""

from collections import deque
from functools import partial

import torch
import torch.nn.functional as F
from small_models import (
    DIM,
    EARLIER,
    INDEX,
    LENGTH,
    SDPA,
    VOCABULARY,
    Attend,
    Block,
    builder,
    fused,
    heads_of,
    merged_heads,
    model_of,
    tokens,
    written,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_runner import attends, sick

from attnspan import causal
from attnspan.torch import attention

# Checkpoints that repeat attention

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Checkpointed(Block):
    options = {"use_reentrant": False}  # noqa: RUF012

    def forward(self, x, **given):
        return checkpoint(super().forward, x, **self.options, **given)  # sick


class Reentrant(Checkpointed):
    options = {"use_reentrant": True}  # noqa: RUF012


def saving(what):
    """Make a block that saves the results of operators."""
    contexts = partial(create_selective_checkpoint_contexts, what)
    return type("Saving", (Checkpointed,), {"options": {"use_reentrant": False, "context_fn": contexts}})


def names_attention(context, op, *args, **kwargs):
    kept = "attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


Saved, SavedByName = saving([FLASH]), saving(names_attention)
SavedOurs = saving([torch.ops.attnspan.attention.default])


def to_repeat(q, k, v):
    return SDPA(q, k, v, is_causal=True)  # sick


def ours_to_repeat(q, k, v):
    return attention(q, k, v, mask=causal())  # sick


_SAVED = model_of(fused, Saved), model_of(fused, SavedByName)
for _block in (Checkpointed, Reentrant):
    _says = {"name": _block.__name__, "remedy": f"[torch.ops.{FLASH}]"}
    sick("recompute", to_repeat, model_of(to_repeat, _block), *_SAVED, **_says)
_made, _well = (model_of(ours_to_repeat, x) for x in (Checkpointed, SavedOurs))
_OURS = "[torch.ops.attnspan.attention.default]"
sick("recompute", ours_to_repeat, _made, _well, remedy=_OURS)


# Random numbers that a checkpoint does not restore


class Forgetful(Checkpointed):
    options = {"use_reentrant": False, "preserve_rng_state": False}  # noqa: RUF012


class Dropping(Block):
    def forward(self, x, **given):
        return super().forward(F.dropout(x, 0.3, self.training), **given)  # sick


class ForgetfulDropping(Forgetful, Dropping):
    pass


class CarefulDropping(Checkpointed, Dropping):
    pass


def dropped(q, k, v):
    return SDPA(q, k, v, dropout_p=0.3 * torch.is_grad_enabled(), is_causal=True)  # sick


def dropped_after(q, k, v):
    return F.dropout(fused(q, k, v), 0.3, torch.is_grad_enabled())  # sick


class OwnNumbers(Block):
    """Random numbers of a generator in a checkpoint, or drawn before it."""

    early = False

    def __init__(self, attend):
        super().__init__(attend)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, x):
        return torch.rand(x.shape, generator=self.generator) > 0.3  # sick

    def part(self, x, kept):
        return super().forward(x * (self.draw(x) if kept is None else kept))

    def forward(self, x):
        return checkpoint(self.part, x, self.draw(x) if self.early else None, use_reentrant=False)


class DrawnBefore(OwnNumbers):
    early = True


for _attend in (dropped, dropped_after):
    sick("recompute-random", _attend, model_of(_attend, Forgetful), model_of(_attend, Checkpointed))
for _code, _model, _well, _says in (
    (Dropping, ForgetfulDropping, CarefulDropping, {"remedy": "preserve_rng_state=False"}),
    (OwnNumbers, OwnNumbers, DrawnBefore, {"remedy": "draw before checkpoint", "beside": ("state",)}),
):
    _made, _twin = model_of(block=_model), model_of(block=_well)
    sick("recompute-random", _code, _made, _twin, right=_made, **_says)


# Dropout in evaluation mode


def always(q, k, v):
    return SDPA(q, k, v, dropout_p=0.1, is_causal=True)  # sick


def always_after(q, k, v):
    return F.dropout(fused(q, k, v), 0.1)  # sick


class Always(Block):
    """Dropout with a probability that depends on the mode, or does not."""

    always = True

    def forward(self, x):
        return super().forward(F.dropout(x, 0.1, training=self.always or self.training))  # sick


class OnlyInTraining(Always):
    always = False


class Unlisted(Block):
    """Dropout in a list, which the module does not know, or in a list of modules."""

    kind = list

    def __init__(self, attend):
        super().__init__(attend)
        self.drops = self.kind([nn.Dropout(0.3)])

    def forward(self, x):
        return super().forward(self.drops[0](x))  # sick


class Listed(Unlisted):
    kind = nn.ModuleList


sick("dropout-in-eval", always, model_of(always), model_of(dropped))
sick("dropout-in-eval", always_after, model_of(always_after), model_of(dropped_after))
_MODE = {"cause": "does not depend on self.training", "remedy": "self.training", "evidence": "(absolute)"}
_LIST = {"cause": "in training mode after model.eval()", "remedy": "nn.ModuleList"}
for _model, _well, _says in ((Always, OnlyInTraining, _MODE), (Unlisted, Listed, _LIST)):
    _made, _twin = model_of(block=_model), model_of(block=_well)
    sick("dropout-in-eval", _model, _made, _twin, right=model_of(), **_says)


# Gradients that do not reach parameters

_LIBRARY = torch.library.Library("sick", "FRAGMENT")
for _name in ("halved", "halved_with_gradient"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, lambda x: x.detach() * 0.5, "CPU")
    torch.library.register_fake(f"sick::{_name}", torch.empty_like, lib=_LIBRARY)
torch.library.register_autograd("sick::halved_with_gradient", lambda _, grad: grad * 0.5, lib=_LIBRARY)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 0.5

    @staticmethod
    def backward(*_):
        return None


class HalvedWell(Halved):
    @staticmethod
    def backward(_, grad):
        return grad * 0.5


def untracked(x):
    with torch.no_grad():
        x = x * 0.5  # sick
        return x + 1


def inferred(x):
    with torch.inference_mode():
        x = x * 0.5  # sick
    return x.clone()


def changing(change):
    return model_of(lambda q, k, v: fused(change(q), k, v))


_HALVED, _RIGHT = torch.ops.sick.halved, torch.ops.sick.halved_with_gradient
_DATA = "Remove detach() or .data"
_OPERATOR = "returns a result without a gradient"
#: Changes of q, a part of the cause and of the remedy, and the mended change.
CUT = {
    "detach": (lambda x: x.detach(), "detach ends", "Remove detach()", lambda x: x),  # sick
    "data": (lambda x: x.data, ".data ends", _DATA, lambda x: x),  # sick
    "no_grad": (untracked, "torch.no_grad", "out of torch.no_grad()", lambda x: x * 0.5 + 1),
    "inference": (inferred, "torch.inference_mode", "out of torch.inference_mode()", lambda x: x * 0.5),
    "operator": (lambda x: _HALVED(x), "sick.halved", "register_autograd", lambda x: _RIGHT(x)),  # sick
    "backward": (lambda x: Halved.apply(x), "HalvedBackward", "Return a gradient", HalvedWell.apply),  # sick
    "tensor": (lambda x: torch.tensor(x), _OPERATOR, "x.clone()", lambda x: x.clone()),  # sick
}
for _name, (_change, _cause, _remedy, _well) in CUT.items():
    _tried = "without it, 2 of 2" if _name in ("detach", "data", "no_grad") else ""
    _right = {"operator": lambda x: x * 0.5, "backward": lambda x: x * 0.5}.get(_name, _well)
    _what = "=2 trainable parameters have no gradient: blocks.0.q.weight, blocks.0.q.bias"
    _says = {"what": _what, "cause": _cause, "remedy": _remedy, "tried": _tried}
    _made, *_twins = changing(_change), changing(_well)
    sick("no-gradient", _change, _made, *_twins, name=_name, right=changing(_right), **_says)


class Distilled(nn.Module):
    """A student follows a teacher, which gets no gradient: by detach(), or by torch.no_grad()."""

    def __init__(self, how):
        super().__init__()
        self.how, self.embed = how, nn.Embedding(VOCABULARY, DIM)
        self.student, self.teacher = (
            nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(3)))
            for _ in range(2)
        )
        self.layer = nn.Linear(DIM, DIM)
        if how == "frozen":
            self.teacher.requires_grad_(False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.how == "detach":
            target = self.teacher(x).detach()  # sick: detach
        elif self.how == "no_grad":
            with torch.no_grad():
                target = self.teacher(x)  # sick: no_grad
        elif self.how == "layer":
            x, target = x + self.layer(x).detach(), x  # sick: layer
        else:
            target = self.teacher(x.detach())
        return {"loss": F.smooth_l1_loss(self.student(x), target)}


@builder
def distilled(how):
    return Distilled(how), tokens()


# Each of three layers saves its input and its GELU's input. The first input belongs to the embedding too.
_SAVED = f"saves {6 * 2 * LENGTH * DIM * 4 / 1024:.1f} KiB"
_FROZEN = {
    "severity": "note",
    "what": "=The parameters of teacher are trainable but get no gradient, from this line",
    "tried": "=frozen and in torch.no_grad(), results and all other gradients are equal",
}
_FREEZE = "teacher.requires_grad_(False)"
_LAYER = "=2 trainable parameters have no gradient: layer.weight, layer.bias"
for _how, _twins, _says in (
    ("detach", [distilled("frozen")], {"remedy": (_FREEZE, _SAVED)} | _FROZEN),
    ("no_grad", [distilled("frozen")], {"remedy": _FREEZE, "not_remedy": _SAVED} | _FROZEN),
    ("layer", [], {"what": _LAYER}),
):
    _code = Distilled, f"# sick: {_how}"
    sick("no-gradient", _code, distilled(_how), *_twins, name=f"distilled, {_how}", **_says)


# NaN, and numbers that are too large for float16

HALF = {"dtype": torch.float16, "expected": {}}
LARGEST = "largest number is 65504"


@attends("nan")
def zero_by_zero(q, k, v):
    rest = fused(q, k, v)
    rest = rest - rest
    return rest / rest.sum(-1, keepdim=True)  # sick


@attends("nan")
def root_at_zero(q, k, v):
    out = fused(q, k, v)
    return out + (out - out).sqrt()  # sick


def narrow_softmax(q, k, v):
    return (q @ k.mT).masked_fill(~EARLIER, -torch.inf).softmax(-1) @ v


def within_range(q, k, v):
    return (q @ k.mT + (~EARLIER).to(q.dtype) * torch.finfo(q.dtype).min).softmax(-1) @ v


def hidden_by_infinity(q, k, v):
    low = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(~EARLIER, -torch.inf)
    return (q @ k.mT + low).softmax(-1) @ v  # sick


@attends("nan", model=HALF, cause=("inf in float16 at", LARGEST))
def product(q, k, v):
    scores = (q * 3000) @ (k * 3000).mT  # sick
    return scores.softmax(-1) @ v


@attends(
    "nan",
    within_range,
    hidden_by_infinity,
    narrow_softmax,
    model=HALF,
    cause=("-1e+09 becomes -inf in float16", LARGEST),
)
def product_of_mask(q, k, v):
    low = torch.tensor(-1e9, dtype=q.dtype)  # sick
    return (q @ k.mT + (~EARLIER).to(q.dtype) * low).softmax(-1) @ v


@attends("nan", model=HALF, cause=("becomes inf in float16", LARGEST))
def squares(q, k, v):
    out = fused(q, k, v)
    size = ((out + 300) ** 2).sum(-1, keepdim=True)  # sick
    return out * (size - size)


@attends("hidden-rows", model=HALF, cause=("-1e+09 becomes -inf in float16", LARGEST))
def hidden_by_overflow(q, k, v):
    low = (INDEX[:, None] <= INDEX).to(q.dtype) * -1e9  # sick
    return (q @ k.mT + low).softmax(-1) @ v  # sick


# The same product again


class Denoiser(nn.Module):
    """A few steps over latents (B, S, C), with a text that does not change. `once`: it is read once."""

    once = False

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def read(self, text):
        return self.kv(text).chunk(2, -1)  # sick

    def forward(self, x, text):
        read = self.read(text) if self.once else None
        for _ in range(3):
            x = x - self.step(x, *(self.read(text) if read is None else read))
        return x

    def step(self, x, k, v):
        return self.out(merged_heads(SDPA(heads_of(self.q(x)), heads_of(k), heads_of(v))))


class Normed(Denoiser):
    """The text is normalised again too, so its values are equal, and not its memory."""

    def read(self, text):
        return self.kv(self.norm(text)).chunk(2, -1)  # sick


class Encoded(Denoiser):
    """An encoder of two layers runs in each step: one finding at its first product."""

    def read(self, text):
        hidden = self.out(text).relu()  # sick
        return self.kv(hidden).chunk(2, -1)


class Noised(Denoiser):
    """The text has other noise in each step."""

    def read(self, text):
        return self.kv(F.dropout(text, 0.1, self.training)).chunk(2, -1)


class InPlace(Denoiser):
    """The text has the same memory in each step, and other numbers."""

    def step(self, x, k, v):
        out = super().step(x, k, v)
        self.text.mul_(0.9)
        return out

    def forward(self, x, text):
        self.text = text
        with torch.no_grad():
            return super().forward(x, text)


@builder
def denoised(model, once=False):
    made = model()
    made.once = once
    return made, [{"x": torch.randn(2, 6, DIM), "text": torch.randn(2, 9, DIM)}]


_TWO = "2 products with values"
for _model, _twins, _evidence in (
    (Denoiser, [denoised(InPlace)], _TWO),
    (Normed, [denoised(Noised)], _TWO),
    (Encoded, [], (_TWO, "before, and 2 products behind them")),
):
    _says = {"remedy": "once before the loop", "evidence": _evidence}
    sick("repeat", _model, denoised(_model), denoised(_model, once=True), *_twins, **_says)


# A loop without a cache


def whole(q, k, v, kept):
    return SDPA(q, k, v, is_causal=True)  # sick


def whole_written(q, k, v, kept):
    return written(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril())


def cached(q, k, v, kept):
    if kept:
        k, v = (torch.cat([a, b], 2) for a, b in zip(kept, (k, v), strict=True))
    kept[:] = k, v
    return SDPA(q, k, v, is_causal=q.shape[2] > 1)


def bidirectional(q, k, v, kept):
    """Without a causal mask, a new number changes the second layer of all numbers. A cache cannot help."""
    return SDPA(q, k, v)


class Forecast(nn.Module):
    """Predicts a few numbers, one after the other, from all numbers before."""

    def __init__(self, attend):
        super().__init__()
        self.attend, self.embed, self.head = attend, nn.Linear(1, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.ModuleList([nn.Linear(DIM, 3 * DIM) for _ in range(2)])

    @torch.no_grad()
    def forward(self, history):
        caches, new, series = ([], []), history, history
        for _ in range(4):
            x = self.embed(new)
            for inner, kept in zip(self.blocks, caches, strict=True):
                x = x + merged_heads(self.attend(*map(heads_of, inner(x).chunk(3, -1)), kept))
            last = self.head(x[:, -1:])
            series = torch.cat([series, last], 1)
            new = last if self.attend is cached else series
        return series[:, -4:]


@builder
def forecast(attend):
    return Forecast(attend), [{"history": torch.randn(2, 9, 1)}]


_twins = forecast(cached), forecast(bidirectional)
for _code, _attend in ((whole, whole), (written, whole_written)):
    sick("no-cache", _code, forecast(_attend), *_twins, remedy="StaticCache", evidence="are needed")


# Tensors that are kept from step to step

MAPS = []


class Keeping(Attend):
    def __init__(self, attend):
        super().__init__(attend)
        self.maps = []

    def of_tokens(self, q, k, v):
        out = super().of_tokens(q, k, v)
        self.keep(out)
        return out

    def keep(self, out):
        self.maps.append(out.mean(-1))  # sick


class KeepingNewest(Keeping):
    def keep(self, out):
        self.maps.clear()
        super().keep(out)


class KeepingNumbers(Keeping):
    def keep(self, out):
        self.maps.append(out.mean(-1).detach())


class KeepingOutside(Keeping):
    def keep(self, out):
        MAPS.append(out.mean(-1))  # sick


class Extractor:
    """Keeps results that its hook gets."""

    def __init__(self):
        self.found = deque()

    def hook(self, *given):
        self.found.append(given[-1].square())  # sick


class HookedByObject(Keeping):
    def __init__(self, attend):
        super().__init__(attend)
        self.qkv.register_forward_hook(self.hook())

    def hook(self):
        return Extractor().hook

    def keep(self, out):
        pass


class Hooked(HookedByObject):
    def hook(self):
        found = []
        return lambda *given: found.append(given[-1].square())  # sick


for _model, _code, *_wells in (
    (Keeping, Keeping, KeepingNewest, KeepingNumbers),
    (KeepingOutside, KeepingOutside, KeepingNewest),
    (HookedByObject, Extractor, KeepingNewest),
    (Hooked, Hooked, KeepingNewest),
):
    _says = {"name": _model.__name__, "remedy": ".clear()", "evidence": "after steps 1, 2, 3"}
    sick("kept", _code, *(model_of(block=x) for x in (_model, *_wells)), **_says)
