"""`enable` and `disable`: attention of one model of diffusers, or of a pipeline's models, and of no other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
from torch import nn

from attnspan.errors import UsageError, expect

from ._diffusers_attention import NAME, check_config
from ._diffusers_reroute import Reroute, is_rerouted, restored, uses_attention

__all__ = ["NAME", "Enabled", "disable", "enable"]


@dataclass(frozen=True)
class Enabled:
    """Result of `enable`; ``print`` it.

    Attributes:
        layers: Names of the modules whose attention is attnspan's, with the component's name in front if they
            are a pipeline's.
        left: Names of modules with a processor that calls no softmax attention known here, such as linear
            attention. They are unchanged.
    """

    layers: tuple[str, ...]
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        left = f"; unchanged: {', '.join(self.left)}" if self.left else ""
        return f"attnspan in {len(self.layers)} attention layers{left}"


def enable(model: Any, components: Iterable[str] | None = None) -> Enabled:
    """Compute a model's attention by attnspan.

    Results are those of diffusers' native backend within rounding. The weights and the processors' options
    stay as they are; no other model is touched. Call it again after processors were exchanged
    (``set_attn_processor``, ``fuse_qkv_projections``, ``load_ip_adapter``).

    Args:
        model: A model of diffusers, any module that holds one, or a pipeline.
        components: Names of a pipeline's components; by default all of its models of diffusers that attend,
            but for autoencoders.

    Returns:
        The names of the layers it took, and of those it left.

    Raises:
        UsageError: It found no attention that it could take; a component is absent or of another library; the
            model runs over several ranks by diffusers' own configuration.

    Example:
        >>> from diffusers import FluxTransformer2DModel
        >>> sizes = {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2}
        >>> sizes |= {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        >>> widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
        >>> print(enable(FluxTransformer2DModel(**sizes, **widths)))
        attnspan in 3 attention layers
    """
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
    "attention by dispatch_attention_fn or F.scaled_dot_product_attention",
    "none in its modules and processors",
    "Set processors that call one of these, such as AttnProcessor2_0",
)


def disable(model: Any, components: Iterable[str] | None = None) -> None:
    """Undo `enable`; a model where it was never called stays as it is.

    Args:
        model: What was given to `enable`.
        components: As there.
    """
    for _, part in _parts(model, components):
        for _, x, owner in _processors(part):
            if getattr(x, "_attention_backend", None) == NAME:
                del x._attention_backend  # Its class has the one that it was made with.
            if is_rerouted(x):
                new = restored(x)
                if owner is not None:
                    owner.processor = new


def _check_config_of(x: Any) -> None:
    """Raise if an object attends over several ranks in diffusers' own way."""
    config = getattr(x, "_parallel_config", None)
    if config is not None:
        check_config(config)


def _processors(model: nn.Module) -> Iterator[tuple[str, Any, nn.Module | None]]:
    """Objects that may attend: plain processors, with the modules that hold them, and modules."""
    for name, module in list(model.named_modules()):
        processor = getattr(module, "processor", None)
        if processor is not None and not isinstance(processor, nn.Module):
            yield name, processor, module
        yield name, module, None


def _parts(model: Any, components: Iterable[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """The models to look into, and what stands before their modules' names."""
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
        wanted, remedy = "a component that is a model", f"It has {', '.join(map(str, found))}"  # type: ignore[arg-type]
        expect(fits, name, wanted, type(part).__name__, remedy, error=UsageError)
        fits = not hasattr(part, "set_attn_implementation")
        wanted, remedy = "a model of diffusers", f'Call pipeline.{name}.set_attn_implementation("attnspan")'
        expect(fits, name, wanted, "one of transformers", remedy, error=UsageError)
        yield f"{name}.", part  # type: ignore[misc]


def _is_model(x: Any) -> bool:
    # A compiled component is a module around the model.
    x = getattr(x, "_orig_mod", x)
    return isinstance(x, diffusers.ModelMixin) and ".autoencoders." not in type(x).__module__
