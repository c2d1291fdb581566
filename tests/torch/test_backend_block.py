"""`attnspan.backend` and torch's `sdpa_kernel`: which backend runs the calls of a block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from closeness import relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

import attnspan
from attnspan.call.backend import asked
from attnspan.errors import DtypeError, OptionError
from attnspan.jax import attention as attention_of_jax
from attnspan.torch import attention, call_jax, checkpoint_policy, explain, keep_backend
from attnspan.torch import scaled_dot_product_attention as ours

# Of torch's own: of what forward mode loads, and of how compilers read an autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

Q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ours": lambda: attnspan.backend("math"),
    "torch's": lambda: sdpa_kernel(SDPBackend.MATH),
}


def _derivatives(attend: Callable[..., Tensor], x: Tensor = Q) -> list[Tensor]:
    """The output, its tangent, and the derivative of a gradient's square."""
    out, tangent = torch.func.jvp(lambda q: attend(q, x, x, is_causal=True), (x,), (x.cos(),))
    q = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(attend(q, q, q, is_causal=True).square().sum(), q, create_graph=True)
    return [out, tangent, *torch.autograd.grad(grad.square().sum(), q)]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_derivative_where_users_cannot_name_a_backend(block: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        wanted, theirs = _derivatives(torchs, Q.double()), _derivatives(torchs)
    with BLOCKS[block]():
        found = _derivatives(ours)
    for got, peer, want in zip(found, theirs, wanted, strict=True):
        assert relative_error(got, want) <= 8 * relative_error(peer, want) + torch.finfo(torch.float32).eps
    with pytest.raises(NotImplementedError, match=r"`with attnspan.backend\(\"math\"\):`"):
        _derivatives(ours)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_compiled_function_has_a_program_for_each(block: str) -> None:
    kernels = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        kernels.append(module.code.count("attnspan.attention"))
        return module

    program = torch.compile(lambda x: ours(x, x, x), fullgraph=True, backend=backend)
    for inside in (False, True, False, True):
        with BLOCKS[block]() if inside else nullcontext():
            program(Q)
    assert kernels == [1, 0]

    def inner(x: Tensor) -> Tensor:
        if block == "ours":
            with attnspan.backend("math"):
                y = ours(x, x, x)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                y = ours(x, x, x)
        return y + ours(x, x, x)

    torch.compile(inner, fullgraph=True, backend=backend)(Q)
    assert kernels == [1, 0, 1]


def test_threads_share_a_block() -> None:
    """Both are in it at once, and each leaves it to the name that it came from."""
    block, both, names = attnspan.backend("math"), threading.Barrier(2), {}

    def run(outer: str | None) -> None:
        seen = names[outer] = [asked(None)]
        with attnspan.backend(outer):
            with block, block:
                both.wait()
                seen.append(explain(Q, Q, Q).backend)
                with attnspan.backend(None):
                    seen.append(asked(None))
                seen.append(explain(Q, Q, Q, backend="cpu").backend)
                both.wait()
            seen.append(asked(None))
        seen.append(asked(None))

    with attnspan.backend("triton"):  # which no other thread is in
        threads = [threading.Thread(target=run, args=(outer,)) for outer in ("cpu", None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert asked(None) == "triton"
    assert names == {x: [None, "math", None, "cpu", x, None] for x in ("cpu", None)}


def test_a_block_that_ends_inside_of_another() -> None:
    """A generator's, which was suspended in it, and one that an error leaves."""

    def suspended() -> Iterator[None]:
        with attnspan.backend("math"):
            yield

    generator = suspended()
    next(generator)
    with attnspan.backend("triton"):
        generator.close()
        with pytest.raises(KeyError), attnspan.backend("flex"):
            raise KeyError
        assert asked(None) == "triton"
    assert asked(None) is None


def _gradient(block: str | None, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a call in a block that has ended before the backward pass."""
    x = Q.clone().requires_grad_()
    with attnspan.backend(block):
        out = call(x)
    return torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_keeps_the_backend_of_its_block(selective: bool) -> None:
    policy = (partial(create_selective_checkpoint_contexts, checkpoint_policy),) if selective else ()

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x)

    def kept(x: Tensor) -> Any:
        return checkpoint(attend, x, use_reentrant=False, context_fn=partial(keep_backend, *policy))

    assert torch.equal(_gradient("math", kept), _gradient("math", attend))
    with attnspan.backend("math"):  # The forward pass had none.
        assert torch.equal(_gradient(None, kept), _gradient(None, attend))
    with pytest.raises(CheckpointError):
        _gradient("math", lambda x: checkpoint(attend, x, use_reentrant=False))
    if not selective:  # Recomputed twice.
        x = Q.clone().requires_grad_()
        with attnspan.backend("math"):
            out = kept(x)
        (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert torch.equal(first, torch.autograd.grad(out.sum(), x)[0])


@pytest.mark.slow
def test_it_is_part_of_the_key_of_every_jit() -> None:
    x, traces = jnp.ones((1, 2, 4, 8)), []

    @jax.jit
    def attend(x: jax.Array) -> jax.Array:
        traces.append(1)
        return attention_of_jax(x, x, x)

    def tangent() -> Any:
        return jax.jvp(attend, (x,), (x,))[1]

    attend(x)
    with attnspan.backend("math"):
        assert tangent().shape == x.shape
        attend(x)
        call_jax(lambda x: jax.jvp(attend, (x,), (x,))[1], Q)
    attend(x)
    assert len(traces) <= 4  # without a block; in one, alone, in jvp and for a tensor
    with pytest.raises((TypeError, NotImplementedError), match="custom_vjp"):
        tangent()


def test_what_a_block_refuses() -> None:
    with pytest.raises(DtypeError, match=r"backend: expected a name or None, got int. Pass a name"):
        attnspan.backend(3)  # type: ignore[arg-type]
    with (
        attnspan.backend("nope"),
        pytest.raises(OptionError, match=r"got 'nope'.*the block of attnspan.backend"),
    ):
        attention(Q, Q, Q)
