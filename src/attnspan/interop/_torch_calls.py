"""A torch function as an operation of JAX: on XLA's buffers on a CPU, by a callback to the host elsewhere."""

import ctypes
import functools
import gc
import itertools
import secrets
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.dlpack import from_dlpack

from .._plain import check_plain
from ..errors import DtypeError, ShapeError, expect
from ..jax.backends.cpu import register as register_targets
from ..jax.varying import axes_of, axes_of_types, spread
from ..kernels import cpu
from ._convert import TYPES, as_arguments, check_layout, check_width, jax_dtype, torch_dtype

#: A function of tensors, which returns tensors.
Run = Callable[..., Sequence[Any]]
#: As the compiled module hands it over: address, XLA's number of the element type, shape.
_Buffer = tuple[int, int, tuple[int, ...]]
_Memories = list["weakref.ref[Any]"]


def call(fn: Callable[..., Any], results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function with arrays, at once or as a part of the program that JAX traces."""
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    for i, x in enumerate(leaves):
        _check_leaf(f"argument leaf {i} of the torch function", x)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
    remedy = "Call the torch function itself where no array is involved"
    expect(places, "from_torch", "at least one array", "none", remedy)
    trees: list[Any] = []

    def flat(*tensors: Any) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(places, tensors, strict=True):
            filled[i] = x
        given, named = jax.tree_util.tree_unflatten(tree, filled)
        found, structure = jax.tree_util.tree_flatten(fn(*given, **named))
        trees[:] = [structure]
        expected, remedy = "tensors, in any structure that is a pytree of JAX", "Return tensors only"
        for x in found:
            what, got = "the result of the torch function", f"a {type(x).__name__}"
            expect(isinstance(x, torch.Tensor), what, expected, got, remedy, error=DtypeError)
        return found

    arrays = [leaves[i] for i in places]
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        made = _arrays_of(_read(functools.partial(_forward, flat), _tensors_of(arrays)))
    elif results is None:
        made = _traced(flat, _inferred(flat, arrays))(*arrays)
    else:
        declared, structure = jax.tree_util.tree_flatten(results)
        made, trees = _traced(flat, declared)(*arrays), [structure]
    return jax.tree_util.tree_unflatten(trees[-1], made)


def _check_leaf(name: str, x: Any) -> None:
    """Raise unless it is an array that torch can read, or no array at all."""
    remedy = "Convert it with jax.dlpack.from_dlpack(x), or close over it"
    is_tensor = isinstance(x, torch.Tensor)
    expect(not is_tensor, name, "arrays of JAX or NumPy", "a tensor of torch", remedy, error=DtypeError)
    if isinstance(x, jax.Array):
        plain, remedy = not jnp.issubdtype(x.dtype, jax.dtypes.extended), "Pass jax.random.key_data(key)"
        expect(plain, name, "an element type that torch has", x.dtype, remedy, error=DtypeError)
    if isinstance(x, np.ndarray):
        check_plain(name, x)
        check_width(name, x.dtype)


def _inferred(flat: Run, arrays: Sequence[Any]) -> list[Any]:
    """Shapes and element types of the results, without running the function on data."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [torch.empty(x.shape, dtype=torch_dtype("argument", x.dtype)) for x in arrays]
        found = _read(flat, fakes)  # Writes are found before they spoil anything.
        return [jax.ShapeDtypeStruct(tuple(x.shape), jax_dtype("result", x.dtype)) for x in found]


def _traced(flat: Run, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function where JAX traces, with its derivative."""
    run = _operation(functools.partial(_forward, flat), results)

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return run(*arrays)

    def forward(*arrays: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return call(*arrays), arrays

    def backward(arrays: tuple[Any, ...], grads: list[Any]) -> tuple[Any, ...]:
        wanted = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
        there = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
        shapes = [x for x, want in zip(arrays, wanted, strict=True) if want]
        gradients = _operation(functools.partial(_gradients, flat, wanted, there), shapes)
        found = iter(gradients(*arrays, *itertools.compress(grads, there)))
        return tuple(next(found) if want else None for want in wanted)

    call.defvjp(forward, backward)
    # Within `shard_map`: what varies over one axis of the mesh makes all results vary over it.
    return lambda *arrays: call(*spread(tuple(arrays), axes_of(*arrays)))


def _forward(flat: Run, *tensors: Any) -> Sequence[Any]:
    with torch.no_grad():
        return flat(*tensors)


def _gradients(flat: Run, wanted: Sequence[bool], there: Sequence[bool], *given: Any) -> list[Any]:
    """The gradients of the arguments that are wanted, from those of the results behind them."""
    tensors = [x.detach().requires_grad_(want) for x, want in zip(given, wanted, strict=False)]
    sources = list(itertools.compress(tensors, wanted))
    # Complex gradients of torch are the conjugates of JAX's.
    grads = [x.conj() for x in given[len(wanted) :]]
    with torch.enable_grad():
        found = itertools.compress(flat(*tensors), there)
        pairs = [(x, g) for x, g in zip(found, grads, strict=True) if x.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in sources]
        outs, incoming = zip(*pairs, strict=True)
        made = torch.autograd.grad(outs, sources, incoming, materialize_grads=True)
    return [x.conj() for x in made]


def _tensors_of(arrays: Sequence[Any]) -> list[Any]:
    """Tensors in the memory of arrays; NumPy's own may be read-only, which torch cannot express."""
    return [from_dlpack(x if isinstance(x, jax.Array) else jnp.asarray(x)) for x in arrays]


def _arrays_of(tensors: Sequence[Any]) -> list[Any]:
    """Arrays in memory of their own: arrays never change, and torch may go on writing to its tensors."""
    made = []
    for x in tensors:
        jax_dtype("result", x.dtype)
        own = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        made.append(jax.dlpack.from_dlpack(own))
    return made


def _read(run: Run, tensors: Sequence[Any]) -> Sequence[Any]:
    """Run the function on fresh tensors; raise if it wrote to one."""
    found = run(*tensors)
    expected, got = "a tensor that is read, as JAX's arrays never change", "one that it wrote to"
    for i, x in enumerate(tensors):
        remedy = "Clone it first; the array of JAX is spoilt"
        expect(not x._version, f"argument {i} of the torch function", expected, got, remedy)
    return found


def _check_results(found: Sequence[Any], declared: Sequence[tuple[tuple[int, ...], Any]]) -> None:
    """Raise unless the tensors have the shapes and torch's element types that the program was made for."""
    what, remedy = "torch function", "Return what `results` declares, or as for torch's fake tensors"
    expect(
        len(found) == len(declared), what, f"{len(declared)} results", len(found), remedy, error=ShapeError
    )
    for i, (x, (shape, dtype)) in enumerate(zip(found, declared, strict=True)):
        name, got = f"result {i} of the {what}", tuple(x.shape)
        expect(got == tuple(shape), name, f"{tuple(shape)}", got, remedy, error=ShapeError)
        expect(x.dtype == dtype, name, f"{dtype}", x.dtype, remedy, error=DtypeError)
        check_layout(name, x)


# The operation, as JAX sees it.


class _Function:
    """What a program calls, by its key; it lives as long as a program that has the key."""

    # Keys are words of compiled programs. No other process has them, should a program get there.
    keys = itertools.count(secrets.randbits(62))

    def __init__(self, run: Run) -> None:
        self.run, self.key = run, next(self.keys)
        _functions[self.key] = self

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """By JAX's own callback: on its copies of the arguments."""
        return tuple(as_arguments(_read(self.run, _tensors_of(arrays))))


_functions: "weakref.WeakValueDictionary[int, _Function]" = weakref.WeakValueDictionary()


def _operation(run: Run, results: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of arrays that calls ``run`` with tensors wherever and however JAX runs it.

    ``results`` have the shape and element type of each of its results. Its arrays, of which there is at least
    one, all vary over the same axes; `vmap` calls it once for each element. It has no derivative.
    """
    function = _Function(run)
    declared = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)

    def call(*arrays: Any) -> list[Any]:
        return list(_call.bind(*arrays, function=function, results=declared))

    mapped: Callable[..., list[Any]] = jax.custom_batching.sequential_vmap(call)
    return mapped


def _at_once(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[Any]:
    """Outside of `jit`: on the memory of the arrays, if one CPU has all of them."""
    devices = set().union(*(x.devices() for x in arrays if isinstance(x, jax.Array)))
    if len(devices) > 1 or any(x.platform != "cpu" for x in devices):
        run = jax.jit(lambda *given: _call.bind(*given, function=function, results=results))
        return list(run(*arrays))
    found = _read(function.run, _tensors_of(arrays))
    _check_results(found, [(x.shape, torch_dtype("result", x.dtype)) for x in results])
    return _arrays_of(found)


def _avals(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[ShapedArray]:
    del function
    like = arrays[0]  # What they vary over is alike in all of them.
    if not axes_of_types(like):
        return [ShapedArray(x.shape, x.dtype) for x in results]
    whole = [like.sharding.update(spec=PartitionSpec(*(None,) * len(x.shape))) for x in results]
    return [
        like.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding)
        for x, sharding in zip(results, whole, strict=True)
    ]


def _by_callback(*arrays: Any, function: _Function, results: Sequence[Any]) -> list[Any]:
    return list(jax.pure_callback(function, tuple(results), *arrays))


def _lower_to_buffers(ctx: Any, *operands: Any, function: _Function, results: Sequence[Any]) -> Any:
    if cpu.core is None:
        return _lower_to_callback(ctx, *operands, function=function, results=results)
    register_targets()
    cpu.core.set_xla_callback(_on_buffers)
    # The executable itself holds what it is made with, and no cache on disk takes it.
    ctx.module_context.add_host_callback(function)
    return jax.ffi.ffi_lowering("attnspan_callback")(ctx, *operands, key=np.int64(function.key))


_lower_to_callback = mlir.lower_fun(_by_callback, multiple_results=True)
_call = Primitive("attnspan_from_torch")
_call.multiple_results = True
_call.def_impl(_at_once)
_call.def_abstract_eval(_avals)
mlir.register_lowering(_call, _lower_to_callback, cacheable=False)
mlir.register_lowering(_call, _lower_to_buffers, platform="cpu", cacheable=False)

# Where XLA runs it, the compiled module calls `_on_buffers`.


def _on_buffers(key: int, arguments: Sequence[_Buffer], results: Sequence[_Buffer]) -> str | None:
    """Run a function between XLA's buffers; return what went wrong.

    XLA reuses the memory of the arguments after the call, so that none of them may be held any longer.
    """
    function = _functions.get(key)
    if function is None:
        return "attnspan.jax.from_torch: expected a program of this process, got one of another"
    memories: _Memories = []
    wrong = None
    try:
        _fill(function.run, arguments, results, memories)
    except BaseException as error:  # All of them are XLA's to report.
        wrong = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}"
    if any(x() is not None for x in memories):
        gc.collect()  # Collect cycles that are no longer referenced.
    held = [str(i) for i, x in enumerate(memories) if x() is not None]
    if not held:
        return wrong
    expected = "one that keeps none of its arguments, whose memory is JAX's"
    got = f"one that still holds argument {', '.join(held)} after the call"
    return f"OptionError: the torch function: expected {expected}, got {got}. Clone what you keep."


def _fill(run: Run, arguments: Sequence[_Buffer], results: Sequence[_Buffer], memories: _Memories) -> None:
    found = _read(run, [_view(x, memories) for x in arguments])
    _check_results(found, [(shape, getattr(torch, TYPES[number])) for _, number, shape in results])
    with torch.no_grad():
        for x, buffer in zip(found, results, strict=True):
            _view(buffer, []).copy_(x)


def _view(buffer: _Buffer, memories: _Memories) -> Any:
    """A tensor in XLA's memory. The weak reference dies with the last tensor or array that looks at it."""
    address, number, shape = buffer
    dtype = getattr(torch, TYPES[number])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:  # XLA has no memory for it, and torch makes none of it.
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * size).from_address(address)
    memories.append(weakref.ref(memory))
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
