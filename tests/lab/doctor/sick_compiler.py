"""Sick models that the compiler cannot take, compiles again and again, or computes otherwise."""

import inspect
from functools import partial

import torch
from sick_steps import Checkpointed, Saved, names_attention
from small_models import (
    CAUSAL,
    DIM,
    IDS,
    LENGTH,
    SDPA,
    Block,
    Model,
    builder,
    fused,
    heads_of,
    merged_heads,
    model_of,
    tokens,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch_runner import attends, sick

# Graph breaks

breaks = partial(attends, "graph-break", stage="compiled")


@breaks()
def printing(q, k, v):
    print("attention of", q.shape[2], "tokens")  # sick
    return fused(q, k, v)


@breaks(model={"expected": {}})
def written_and_printed(q, k, v):
    print(end="")  # sick
    return (q @ k.mT).softmax(-1) @ v


SIZES = {"batch": {"sizes": torch.tensor([20, LENGTH])}}
CAPTURE = "with torch._dynamo.config.capture_scalar_outputs = True: "


@breaks(
    model=SIZES,
    remedy="=Move this line out of the compiled region",
    tried=(CAPTURE, "graph breaks in the first batch"),
)
def branching_on_a_value(q, k, v, sizes):
    most = sizes.max().item()  # sick
    if most > q.shape[2]:
        raise ValueError(most)
    return fused(q, k, v)


@breaks(
    model=SIZES,
    remedy="capture_scalar_outputs = True",
    not_remedy="earlier graph break",
    tried=f"={CAPTURE}no graph break here in the first batch",
)
def reading_a_value(q, k, v, sizes):
    return fused(q, k, v) * (1.0 / sizes.max().item())  # sick


@torch._dynamo.disable
def hidden(q, k, v):
    """As a function of an extension module, which the compiler cannot look into."""
    return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True)


@breaks()
def extension(q, k, v):
    return hidden(q, k, v)  # sick


@breaks(model={"expected": {}, "batch": {"documents": IDS}})
def mask_function(q, k, v, documents):
    """A trainer that looks at the signature of its mask function, as `create_block_mask` once did itself."""

    def document_mask(b, h, i, j):
        return documents[b, i] == documents[b, j]

    if len(inspect.signature(document_mask).parameters) != 4:  # sick
        raise TypeError("a mask function takes b, h, q_idx and kv_idx")
    mask = create_block_mask(document_mask, len(q), None, q.shape[2], q.shape[2], device="cpu")
    return flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask)


@attends("error", model={"expected": {}})
def flex_on_cpu(q, k, v):
    return flex_attention(q, k, v)  # sick


# Operators whose fake kernel is wrong, or is missing

_LIBRARY = torch.library.Library("sick_attention", "DEF")


def defined(name, fake=None):
    """Define an operator that returns (B, H, S, D) with the strides of (B, S, H, D), as flash kernels do."""
    _LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v) -> Tensor")
    _LIBRARY.impl(name, lambda *x: fused(*x).transpose(1, 2).contiguous().transpose(1, 2), "CPU")
    if fake is not None:
        torch.library.register_fake(f"sick_attention::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.sick_attention, name)


_other_strides = defined("other_strides", lambda q, *_: q.new_empty(q.shape))
_no_fake = defined("no_fake")
_right = defined("right", lambda q, *_: q.new_empty(q.transpose(1, 2).shape).transpose(1, 2))


def right_operator(q, k, v):
    return _right(q.detach(), k.detach(), v.detach())


@attends(
    "operator", right_operator, right=right_operator, beside=("no-gradient",), remedy="Register a fake kernel"
)
def other_strides(q, k, v):
    return _other_strides(q.detach(), k.detach(), v.detach())  # sick


@attends(
    "operator", right_operator, right=right_operator, beside=("no-gradient",), remedy="Register a fake kernel"
)
def no_fake(q, k, v):
    return _no_fake(q.detach(), k.detach(), v.detach())  # sick


sick("graph-break", no_fake, model_of(no_fake), stage="compiled", cause="", remedy="Register a fake kernel")


class NestedContexts(Checkpointed):
    @property
    def options(self):
        def contexts():
            return create_selective_checkpoint_contexts(names_attention)

        return {"use_reentrant": False, "context_fn": contexts}


_PARTIAL = "functools.partial(create_selective_checkpoint_contexts"
_NESTED = model_of(block=NestedContexts), model_of(block=Saved)
sick("compile-error", Checkpointed, *_NESTED, stage="compiled", right=model_of(), remedy=_PARTIAL)


class Frequencies(Block):
    """Complex rotary frequencies, made in no mode, that a forward pass in inference mode reads."""

    def __init__(self, attend):
        super().__init__(attend)
        angles = torch.arange(LENGTH)[:, None] / 9.0 ** torch.arange(DIM // 2)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def rotated(self, x):
        turns = self.turns[: x.shape[1]]  # sick
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(2)


class ByInference(Frequencies):
    @torch.inference_mode()
    def forward(self, x):
        return super().forward(self.rotated(x))


class WithinInference(Frequencies):
    def forward(self, x):
        with torch.inference_mode():
            return super().forward(self.rotated(x))


class WithoutGradients(Frequencies):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(self.rotated(x))


_FAILS = {
    "what": "RuntimeError: Cannot set version_counter for inference tensor",
    "remedy": "=Use torch.no_grad() instead of torch.inference_mode()",
    "tried": "=with torch.no_grad() instead, all batches compile",
}
_RIGHT = model_of(block=WithoutGradients)
for _block in (ByInference, WithinInference):
    _made = model_of(block=_block), _RIGHT
    sick("compile-error", Frequencies, *_made, name=_block.__name__, stage="compiled", right=_RIGHT, **_FAILS)


# Recompilations: counters, lists and strings that change in each call


@builder
def calls_of(block, many=4, model=Model):
    return model(fused, block), tokens((LENGTH,) * many), CAUSAL


class Counting(Block):
    """Counts its calls in a number."""

    def __init__(self, attend):
        super().__init__(attend)
        self.start()

    def start(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # sick
        return super().forward(x) * (1.0 / (1 + self.calls))


class CountingInBuffer(Counting):
    def start(self):
        self.register_buffer("calls", torch.tensor(0))


class CuttingCache(Counting):
    """Cuts a cache at the number of its calls."""

    def start(self):
        super().start()
        self.register_buffer("kept", torch.ones(LENGTH, DIM))

    def forward(self, x):
        self.calls += 1  # sick
        return Block.forward(self, x) + self.kept[: self.calls].sum(0)


class CountingInDict(Block):
    first = staticmethod(lambda: 0)

    def __init__(self, attend):
        super().__init__(attend)
        self.flags = {"calls": self.first()}

    def forward(self, x):
        self.flags["calls"] += 1  # sick
        return super().forward(x) + self.flags["calls"]


class CountingInDictByTensor(CountingInDict):
    first = staticmethod(lambda: torch.tensor(0))


STEPS = [0]


class CountingInGlobal(Block):
    def forward(self, x):
        STEPS[0] += 1  # sick
        return super().forward(x) * STEPS[0]


class Growing(Block):
    """Keeps a number of each call, which nothing uses."""

    def __init__(self, attend):
        super().__init__(attend)
        self.kept = []

    def forward(self, x):
        out = super().forward(x)
        self.kept.append(out.detach().mean())  # sick
        return out


class Summed(Growing):
    def forward(self, x):
        return super().forward(x) + sum(self.kept)


class Measured(Growing):
    """Uses the number of kept results."""

    def forward(self, x):
        return super().forward(x) + len(self.kept)


class Filled(Block):
    """Keeps results in one tensor of fixed size, instead of a list."""

    def __init__(self, attend):
        super().__init__(attend)
        self.register_buffer("kept", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            self.kept.index_copy_(0, self.count[None], out.detach().mean()[None])
            self.count += 1
        return out + self.count


class Warmed(Block):
    """Receives a temperature, which the model sets to another Python number in each call."""

    def __init__(self, attend):
        super().__init__(attend)
        self.temperature = 1.0
        self.compile(backend="aot_eager")

    def number(self, calls):
        return calls

    def forward(self, x):
        return super().forward(x) * self.temperature  # sick


class WarmedScale(Warmed):
    """The temperature is an argument that takes only a Python number."""

    def number(self, calls):
        return 1 + calls / 8

    def forward(self, x):
        q, (k, v) = self.q(x), self.kv(x).chunk(2, -1)
        out = SDPA(heads_of(q), heads_of(k), heads_of(v), scale=self.temperature)  # sick
        return x + self.out(merged_heads(out))


class Warming(Model):
    calls = 0

    def mixed(self, x):
        self.calls += 1
        for block in self.blocks:
            block.temperature = block.number(self.calls)
        return super().mixed(x)


_FILLED = "temperature as a tensor that is filled in place"


def by_name(q, k, v, mode):
    scale = 0.1 if mode == "a" else 0.2 if mode == "b" else 0.3  # sick
    return SDPA(q, k, v, is_causal=True, scale=scale)


@builder
def named():
    return Model(by_name), [tokens(mode=x)[0] for x in "abcd"], CAUSAL


@builder
def sizes(*shapes):
    return Model(), [tokens((length,), batch)[0] for batch, length in shapes], CAUSAL


_AGAIN = ": 0 recompilations instead of 3"
_FILLED = "temperature as a tensor that is filled in place"
_UNSPEC = "=Set torch._dynamo.config.allow_unspec_int_on_nn_module = True"
_EMPTY = "=Empty kept before each call, outside of the compiled code: kept.clear()"
_NO_CHANGE = "No change that the doctor tried helps. Keep the number of entries"
_SIZE = "=The compiled code requires size 2 of input_ids in dim 0, and a call had 3"
_MARK = "Mark the dimension with torch._dynamo.mark_dynamic(x, dim)"
for _code, _made, _well, _says in (
    (Counting, calls_of(Counting), calls_of(CountingInBuffer), {"remedy": "a buffer"}),
    (CuttingCache, calls_of(CuttingCache), None, {"remedy": _UNSPEC, "not_tried": "more graph break"}),
    (
        *(CountingInDict, calls_of(CountingInDict), calls_of(CountingInDictByTensor)),
        {"remedy": "=Make it a tensor: flags['calls'] = torch.tensor(n)", "tried": _AGAIN},
    ),
    (
        *(CountingInGlobal, calls_of(CountingInGlobal), None),
        {"remedy": "=Make it a tensor: STEPS[0] = torch.tensor(n)", "tried": _AGAIN},
    ),
    (Growing, calls_of(Growing), None, {"remedy": _EMPTY, "tried": _AGAIN}),
    (Growing, calls_of(Summed), None, {"name": "summed", "remedy": _NO_CHANGE, "tried": "but other results"}),
    (
        *(Growing, calls_of(Measured), calls_of(Filled)),
        {"name": "measured", "cause": "len(", "remedy": ("number of entries", "one tensor of fixed size")},
    ),
    (
        *(Warmed, calls_of(Warmed, model=Warming), None),
        {"remedy": "temperature.fill_(n)", "tried": (_FILLED, f"in place{_AGAIN}")},
    ),
    (
        *(WarmedScale, calls_of(WarmedScale, model=Warming), None),
        {"remedy": "temperature.fill_(n)", "tried": (_FILLED, "but 1 more graph break")},
    ),
    (by_name, named(), None, {}),
    (
        *(None, sizes((2, 24), (2, 30), (3, 30)), None),
        {"name": "sizes", "cause": _SIZE, "remedy": _MARK}
        | {"tried": "=with all sizes dynamic: 0 recompilations instead of 2"},
    ),
):
    _twins = [_well] if _well else []
    sick("recompile", _code, _made, *_twins, right=_made, stage="compiled", **_says)
_TENSOR = "calls as a tensor", "0 recompilations instead of 8"
sick("recompile-limit", Counting, calls_of(Counting, 12), stage="compiled", tried=_TENSOR)


# Other results in compiled code, and features that do not go together


class Branching(Block):
    def forward(self, x):  # sick
        return super().forward(x) * (0.9 if torch.compiler.is_compiling() else 1.0)


sick("parity", Branching, model_of(block=Branching), stage="parity")


def detached_in_eager(q, k, v):
    if not torch.compiler.is_compiling():
        q = q.detach()  # sick
    return fused(q, k, v)


def detached_in_compiled(q, k, v):
    if torch.compiler.is_compiling():
        q = q.detach()
    return fused(q, k, v)


_EAGER, _COMPILED = model_of(detached_in_eager), model_of(detached_in_compiled)
_WHAT = "have a gradient in the compiled step, and none in the eager step"
sick("no-gradient", detached_in_eager, _EAGER, stage="parity", what=_WHAT)
_WHAT = "blocks.0.q.weight", "have a gradient in the eager step, and none in the compiled step"
sick("parity", None, _COMPILED, name="gradient", stage="parity", what=_WHAT)


class Noting(Block):
    """Keeps a length: the compiler takes that, and checkpoints do. Together they do not."""

    length = 0

    def forward(self, x):
        self.length = x.shape[1]
        return super().forward(x)


_BOTH = {"what": ("compile", "checkpoint"), "not_what": "order"}
sick("combination", None, model_of(block=Noting), name="noted length", stage="features", **_BOTH)
