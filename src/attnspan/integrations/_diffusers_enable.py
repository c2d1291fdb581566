"""`enable` and `disable`: for one diffusers model or pipeline, and no other, or for diffusers itself."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
from torch import nn

from attnspan.errors import UsageError, expect
from attnspan.torch import compat

from ._diffusers_attention import NAME as NAME
from ._diffusers_attention import attend, check_config
from ._diffusers_names import forget_backend, register
from ._diffusers_reroute import Reroute, is_rerouted, restored, uses_attention
from ._patches import Patches


@dataclass(frozen=True)
class Enabled:
    """Result of `enable`, which you can print.

    Attributes:
        layers: Names of the modules whose attention is now attnspan's. In a pipeline, the component's name
            comes first.
        left: Names of unchanged modules. Their processor calls no softmax attention known here, such as
            linear attention.

    Example:
        >>> print(Enabled(("attn1", "attn2"), ()))
        attnspan in 2 attention layers
    """

    layers: tuple[str, ...]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        left = f", unchanged: {', '.join(self.left)}" if self.left else ""
        return f"attnspan in {len(self.layers)} attention layers{left}"


def enable(model: Any = diffusers, components: Iterable[str] | None = None) -> Enabled:
    """Switch a model's attention to attnspan, or register the backend "attnspan" in diffusers.

    Results equal diffusers' native backend up to rounding. Weights and the processors' options do not change,
    and no other model is affected. Call it again after you exchange processors (``set_attn_processor``,
    ``fuse_qkv_projections``, ``load_ip_adapter``).

    Args:
        model: A diffusers model, a module that contains one, or a pipeline. Default: diffusers itself, whose
            models then support ``set_attention_backend("attnspan")``. The import of this module calls
            ``enable()``, so you need the default only after ``disable()``.
        components: Names of a pipeline's components. Default: all of its diffusers models with attention,
            except autoencoders.

    Returns:
        The names of the changed and of the unchanged layers. No names for diffusers itself.

    Raises:
        UsageError: There is no supported attention, a component is missing or belongs to another library, or
            the model uses diffusers' own context parallelism.

    Example:
        >>> from diffusers import FluxTransformer2DModel
        >>> sizes = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2}
        >>> sizes |= {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        >>> widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
        >>> print(enable(FluxTransformer2DModel(**sizes, **widths)))
        attnspan in 3 attention layers
    """
    if model is diffusers:
        _patches.apply(_enable)
        return Enabled(())
    layers: list[str] = []
    left: list[str] = []
    route = Reroute.to()
    for prefix, part in _parts(model, components):
        before = len(layers)
        for name, x, owner in _processors(part):
            taken = is_rerouted(x) or uses_attention(x)
            if taken or owner is not None:
                (layers if taken else left).append(prefix + name)
            if not taken:
                continue
            _check_config_of(x)
            if not is_rerouted(x):
                new = route.give(x)
                if owner is not None:
                    owner.processor = new
        found = len(layers) > before or components is None
        expect(found, prefix.rstrip("."), *_NONE_FOUND, error=UsageError)
    expect(bool(layers), type(model).__name__, *_NONE_FOUND, error=UsageError)
    return Enabled(tuple(layers), tuple(left))


_NONE_FOUND = (
    "calls of dispatch_attention_fn or F.scaled_dot_product_attention",
    "none in its modules and processors",
    "Set processors that call one of these, such as AttnProcessor2_0",
)


def disable(model: Any = diffusers, components: Iterable[str] | None = None) -> None:
    """Undo `enable`. A model without enabled attention does not change.

    ``disable()`` undoes ``enable()``: diffusers has its own functions again, and does not know the name
    "attnspan". Models that you passed to `enable` keep attnspan. Models whose backend you set to "attnspan"
    raise an error when they run, so call ``reset_attention_backend()`` on them before.

    Args:
        model: The argument of `enable`. Default: diffusers itself.
        components: The argument of `enable`.

    Raises:
        UsageError: A component is missing or belongs to another library. Or another package has patched the
            same function of diffusers since.

    Example:
        >>> from diffusers.models.attention_processor import Attention
        >>> layer = Attention(32, heads=2, dim_head=16)
        >>> print(enable(layer))
        attnspan in 1 attention layers
        >>> disable(layer)
    """
    if model is diffusers:
        _patches.undo()
        return
    for _, part in _parts(model, components):
        for _, x, owner in _processors(part):
            forget_backend(x, NAME)
            if is_rerouted(x):
                new = restored(x)
                if owner is not None:
                    owner.processor = new


def _check_config_of(x: Any) -> None:
    """Raise if an object uses diffusers' own context parallelism."""
    config = getattr(x, "_parallel_config", None)
    if config is not None:
        check_config(config)


def _processors(model: nn.Module) -> Iterator[tuple[str, Any, nn.Module | None]]:
    """Yield objects that may attend: plain processors with the modules that hold them, and modules."""
    for name, module in list(model.named_modules()):
        processor = getattr(module, "processor", None)
        if processor is not None and not isinstance(processor, nn.Module):
            yield name, processor, module
        yield name, module, None


def _parts(model: Any, components: Iterable[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models to search, and the prefix of their modules' names."""
    if isinstance(model, nn.Module):
        remedy = "Leave components out, or pass the pipeline"
        expect(components is None, "components", "None for a model", "names", remedy, error=UsageError)
        yield "", model
        return
    found = getattr(model, "components", None)
    remedy = "Pass a model or a pipeline of diffusers"
    got = type(model).__name__
    expect(isinstance(found, dict), "model", "a module or a pipeline", got, remedy, error=UsageError)
    if components is None:
        components = [name for name, x in found.items() if _is_model(x)]  # type: ignore[union-attr]
    for name in components:
        part = found.get(name)  # type: ignore[union-attr]
        fits = isinstance(part, nn.Module)
        wanted, remedy = "a component that is a model", f"Choose among {', '.join(map(str, found))}"  # type: ignore[arg-type]
        expect(fits, name, wanted, type(part).__name__, remedy, error=UsageError)
        fits = not hasattr(part, "set_attn_implementation")
        wanted, remedy = "a model of diffusers", f'Call pipeline.{name}.set_attn_implementation("attnspan")'
        expect(fits, name, wanted, "a transformers model", remedy, error=UsageError)
        yield f"{name}.", part  # type: ignore[misc]


def _is_model(x: Any) -> bool:
    x = compat.original(x)
    return isinstance(x, diffusers.ModelMixin) and ".autoencoders." not in type(x).__module__


_patches = Patches("diffusers")


def _enable() -> None:
    _patches.later(register(NAME, attend))
    _follow_set_attention_backend()


def _follow_set_attention_backend() -> None:
    """Let a model's own method also change older processors, which would silently keep torch's attention."""
    mixin = diffusers.ModelMixin
    set_backend, reset_backend = mixin.set_attention_backend, mixin.reset_attention_backend

    @functools.wraps(set_backend)
    def set_attention_backend(self: Any, backend: str) -> None:
        if backend.lower() == NAME:
            enable(self)
        else:
            disable(self)
        set_backend(self, backend)

    @functools.wraps(reset_backend)
    def reset_attention_backend(self: Any) -> None:
        disable(self)
        reset_backend(self)

    _patches.set(mixin, "set_attention_backend", set_attention_backend)
    _patches.set(mixin, "reset_attention_backend", reset_attention_backend)
