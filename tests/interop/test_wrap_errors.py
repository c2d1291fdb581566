"""`wrap` refuses by name: contradictions, kernels that lie, derivatives that are missing or wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from foreign_kernel import QKV, Library, eager, fresh_name, inputs, wrap_foreign
from torch import Tensor

from attnspan.torch import DeclarationError, wrap

# Contradictions in the description.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "a::b"}, "name: expected an identifier, got 'a::b'"),
        ({"name": 3}, "name: expected an identifier, got 3"),
        ({"backward": "recompute", "differentiable": "qk"}, "tensor parameters .* got qk"),
        ({"schema": "Tenser q"}, "schema: expected arguments in torch's schema language"),
        ({"schema": "Tensor(a!) q, Tensor k, Tensor v"}, "'q' of the kernel: expected a parameter that the"),
        ({"schema": "Tensor q, Device d"}, "parameter 'd' of the kernel"),
        ({"schema": "int n"}, "expected a kernel with at least one required tensor"),
        ({"outputs": "output"}, "outputs: expected 'out', 'out like q', 'lse'"),
        ({"outputs": ()}, "outputs: expected at least one"),
        ({"outputs": {"q": "out"}}, "got q"),
        ({"outputs": lambda q, x: q + x}, "outputs: expected parameters among q, k, v, causal, scale, got x"),
        ({"outputs": "out", "schema": "Tensor q"}, "expected q, k, v as the first three tensors"),
        ({"layout": "sbhd"}, "layout: expected one of bhsd, bshd, thd"),
        ({"strides": "dense"}, "strides: expected one of any, unit"),
        ({"backward": "again"}, "backward: expected a function"),
        ({"backward": lambda dlse: dlse}, "backward: expected parameters among dout, q"),
        ({"differentiable": ("q",)}, "differentiable: expected None without a backward"),
        ({"backward": "recompute", "differentiable": ("causal",)}, "got causal"),
        ({"varying": ("causal",)}, r"varying: expected names .* that are floats \(scale\), got causal"),
        ({"flops": lambda d: d}, "flops: expected parameters among"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_and_leave_the_name_free(options: dict, text: str) -> None:
    name = fresh_name()
    with pytest.raises(ValueError, match=text):
        wrap(eager, **{"name": name, **options})
    wrap(eager, name=name)


@pytest.mark.parametrize("x", [None, np.ones((1, 2, 4, 8))], ids=["None", "NumPy"])
def test_what_is_no_tensor_is_refused(x: object) -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TypeError, match=r"k: expected a torch.Tensor, got .*Convert it with torch.as_tensor"):
        wrap(eager, name=fresh_name())(q, x, q)


def test_a_name_is_given_once() -> None:
    name = fresh_name()
    first = wrap(eager, name=name, backward="recompute", differentiable="q", varying="scale")
    assert first.differentiable == ("q",), "one name may stand alone"
    assert "Tensor? scale" in repr(first)
    for taken in (name, f"{name}_backward"):
        with pytest.raises(ValueError, match=f"got '{taken}', the name of attnspan_wrapped::{taken}"):
            wrap(eager, name=taken)


def test_a_registration_that_fails_half_way_leaves_the_name_free() -> None:
    other = fresh_name()
    elsewhere = torch.library.Library("attnspan_wrapped", "FRAGMENT")
    elsewhere.define(f"{other}_backward(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match=f"{other}_backward") as kept:
        wrap(eager, name=other, backward="recompute")
    wrap(eager, name=other)
    assert kept.tb, "who keeps the error, as a notebook does, keeps the frames that hold the first library"


#: What a kernel returns of its inputs, and the error.
LIES: dict[str, tuple[Callable[..., object], str]] = {
    "shape": (
        lambda *x: x[0].new_zeros(2, 6, 3, 9),
        r"'out': expected shape \(2, 6, 3, 8\), as declared, got \(2, 6, 3, 9\) from the kernel. Declare",
    ),
    "strides": (
        lambda *x: torch.zeros_like(x[0]).transpose(1, 2).contiguous().transpose(1, 2),
        r"'out': expected strides \(144, 24, 8, 1\), as declared, got \(144, 8, 48, 1\) from",
    ),
    "dtype": (
        lambda *x: x[0].bfloat16(),
        r"'out': expected dtype torch\.float32, .*, got torch\.bfloat16 from",
    ),
    "device": (lambda *x: x[0].to("meta"), r"'out': expected device cpu, as declared, got meta from"),
    "nothing": (lambda *_: None, r"outputs: expected 1 \(out\), as declared, got NoneType from"),
    "array": (lambda *x: [x[0].numpy()], r"'out': expected a torch\.Tensor, as declared, got ndarray from"),
    "number": (
        lambda *x: (x[0] + 1, x[1] + 1),
        r"outputs: expected 1 \(out\), as declared, got 2 values from",
    ),
    "input": (
        lambda *x: x[2],
        r"'out': expected memory that nothing else uses, got memory that it shares with input 'v'",
    ),
    "view": (lambda *x: x[1].view(-1)[:288].view(2, 6, 3, 8), r"shares with input 'k'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_kernel_that_lies_is_one_clear_error(lie: str) -> None:
    kernel, text = LIES[lie]
    unchecked = wrap(kernel, name=fresh_name("liar"), layout="bshd", schema=QKV, check=False)
    if lie in ("shape", "strides", "dtype"):
        assert isinstance(unchecked(*inputs()), Tensor)
    wrapped = wrap(kernel, name=fresh_name("liar"), layout="bshd", schema=QKV)
    with pytest.raises(DeclarationError, match=text):
        wrapped(*inputs())
    if lie == "strides":
        with pytest.raises(DeclarationError, match=text):
            torch.compile(wrapped, fullgraph=True, backend="aot_eager")(*inputs())


def test_outputs_that_share_memory_are_refused() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        memory = q.new_zeros(2, *q.shape)
        return memory[0], memory[1]

    like_q = {"out": "out", "second": lambda q: torch.empty_like(q)}
    wrapped = wrap(both, name=fresh_name(), outputs=like_q)
    with pytest.raises(
        DeclarationError, match=r"'second': expected memory that nothing else uses, .* with output 'out'"
    ):
        wrapped(*inputs())


def test_strides_that_address_nothing_are_no_lie() -> None:
    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros(q.shape[1], q.shape[0], *q.shape[2:]).transpose(0, 1)

    wrapped = wrap(other, name=fresh_name())
    for batch in (0, 1):
        x = torch.randn(batch, 4, 3, 8)
        assert wrapped(x, x, x).shape == x.shape


def test_without_a_backward_it_raises_at_backward(foreign: Library) -> None:
    wrapped = wrap_foreign(foreign, backward=None)
    q, k, v = inputs(grad=True)
    out, _ = wrapped(q, k, v)
    with pytest.raises(NotImplementedError, match=r"was wrapped without one\. Wrap it with backward=fn"):
        out.sum().backward()
    with torch.no_grad():
        assert not wrapped(q, k, v)[0].requires_grad


def test_a_gradient_that_the_backward_does_not_take_is_no_loss_in_silence(foreign: Library) -> None:
    def of_out(dout, q, k, v, softmax_scale, causal):  # type: ignore[no-untyped-def]
        return foreign.backward(dout, torch.zeros(2, 3, 6), q, k, v, softmax_scale, causal)

    wrapped = wrap_foreign(foreign, backward=of_out)
    given = inputs(grad=True)
    out, lse = wrapped(*given)
    (grad,) = torch.autograd.grad(out.sum() + lse.detach().sum(), given[0])
    assert grad.abs().sum() > 0
    out, lse = wrapped(*given)
    with pytest.raises(
        DeclarationError, match=r"gradient of output 'lse': expected none, because .* no parameter dlse"
    ):
        torch.autograd.grad(out.sum() + lse.sum(), given[0])


@pytest.mark.parametrize(
    ("backward", "text"),
    [
        (lambda dout: (dout, dout), r"backward: expected 3 gradients \(of q, k, v\), got 2"),
        (lambda dout: str(dout.dim()), "backward: expected 3 gradients .*, got 1"),
        (
            lambda dout: (dout, dout[:1], dout),
            r"gradient of 'k': expected \(2, 6, 3, 8\), torch.float32, on cpu",
        ),
        (lambda dout: (dout, dout, dout.double()), "gradient of 'v': expected .*, got .*torch.float64"),
        (lambda dout: (dout, dout, 1.0), "gradient of 'v': expected .*, got float"),
    ],
)
def test_a_backward_that_lies_is_one_clear_error(backward: Callable[..., object], text: str) -> None:
    wrapped = wrap(eager, name=fresh_name(), backward=backward)
    with pytest.raises(DeclarationError, match=text):
        wrapped(*inputs(grad=True)).sum().backward()


def test_gradients_are_made_contiguous_and_their_own() -> None:
    def backward(dout: Tensor, q: Tensor) -> tuple[Tensor | None, ...]:
        return None, dout, dout.transpose(1, 2).contiguous().transpose(1, 2)

    wrapped = wrap(eager, name=fresh_name(), backward=backward)
    given = inputs(grad=True)
    dout = torch.randn(given[0].shape)
    dq, dk, dv = torch.autograd.grad(wrapped(*given), given, dout)
    assert torch.equal(dq, torch.zeros(dq.shape))
    assert torch.equal(dk, dout)
    assert torch.equal(dv, dout)
    assert dk.data_ptr() != dout.data_ptr()
    assert dv.is_contiguous()


def test_recompute_of_what_autograd_cannot_see(foreign: Library) -> None:
    wrapped = wrap_foreign(foreign, backward="recompute")
    with pytest.raises(DeclarationError, match="expected a kernel that autograd can differentiate"):
        wrapped(*inputs(grad=True))[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # imported by torch.func
def test_second_derivatives_and_forward_mode_raise() -> None:
    q, k, v = inputs(grad=True)
    wrapped = wrap(eager, name=fresh_name(), backward="recompute")
    (dq,) = torch.autograd.grad(wrapped(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: wrapped(q, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
