"""Torch functions inside XLA's programs: on its buffers, and alive as long as the program."""

# ruff: noqa: ARG004, ARG005  (functions of a fixed signature, some of which need a part of it)

import gc
import importlib
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run_program

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
from_torch = pytest.importorskip("attnspan.jax").from_torch
_convert = importlib.import_module("attnspan.interop._convert")
_torch_calls = importlib.import_module("attnspan.interop._torch_calls")
cpu = importlib.import_module("attnspan.kernels.cpu")
if cpu.core is None:
    pytest.skip("the compiled module is not built", allow_module_level=True)
jnp = jax.numpy

EIGHT = jax.ShapeDtypeStruct((8,), "float32")


def _x() -> Any:
    return jnp.arange(8.0)


def _text(fn: Any, *args: Any) -> str:
    return str(jax.jit(fn).lower(*args).as_text())


def test_no_argument_is_copied() -> None:
    seen = []

    def first(x: Any) -> Any:
        seen.append(x.data_ptr())
        return x[:1] + 1

    x = jnp.zeros(2**20)
    one = from_torch(first, results=jax.ShapeDtypeStruct((1,), "float32"))
    two = from_torch(lambda x: first(x) * 2, results=jax.ShapeDtypeStruct((1,), "float32"))
    assert jax.jit(lambda x: one(x) + two(x))(x).tolist() == [3]
    assert seen == [x.unsafe_buffer_pointer()] * 2


def test_without_the_compiled_module_it_is_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "@attnspan_callback" in _text(from_torch(lambda x: x * 2), _x())
    monkeypatch.setattr(cpu, "core", None)
    text = _text(from_torch(lambda x: x * 2), _x())
    assert "@attnspan_callback" not in text
    assert "python_cpu_callback" in text
    fn = from_torch(lambda x, w: torch.tanh(x * w))
    got = jax.jit(jax.value_and_grad(lambda x, w: fn(x, w).sum()))(_x(), 0.02 * _x())
    want = jax.value_and_grad(lambda x, w: jnp.tanh(x * w).sum())(_x(), 0.02 * _x())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    with pytest.raises(Exception, match="one that it wrote to"):
        jax.jit(from_torch(lambda x: x.mul_(2), results=EIGHT))(_x()).block_until_ready()


def test_every_element_type() -> None:
    numbers = np.array([[1, 0, 3], [1, 1, 0]])
    with jax.enable_x64(True):
        given = {dtype: jnp.asarray(numbers.astype(jnp.dtype(dtype))) for dtype in _convert.TYPES.values()}
        given |= {dtype: x * (1 + 2j) for dtype, x in given.items() if dtype.startswith("complex")}
        # The transpose and the conjugate are views of torch: results need not be dense.
        fn = from_torch(lambda given: {k: (x.t(), x.conj()) for k, x in given.items()})
        for got in (fn(given), jax.jit(fn)(given)):
            for dtype, x in given.items():
                for a, b in zip(got[dtype], (np.asarray(x).T, np.asarray(x).conj()), strict=True):
                    assert a.dtype == x.dtype
                    assert (np.asarray(a) == b).all(), dtype


def test_empty_arrays() -> None:
    total, rows = jax.jit(from_torch(lambda x: (x.sum() + 1, x * 1)))(jnp.ones((0, 3)))
    assert (float(total), rows.shape) == (1, (0, 3))


def test_control_flow_and_transformations() -> None:
    fn = from_torch(lambda x, w: (x * w).sum())
    sums = from_torch(lambda x: torch.cumsum(x, 0))
    rows = jax.jit(lambda x: jax.lax.scan(lambda carry, row: (carry, sums(row)), 0, x)[1])(jnp.ones((3, 2)))
    assert rows.tolist() == [[1, 2]] * 3
    grads = jax.jit(jax.vmap(jax.grad(fn, (0, 1)), in_axes=(0, None)))(jnp.ones((3, 2)), jnp.arange(2.0))
    assert grads[0].tolist() == [[0, 1]] * 3
    assert grads[1].tolist() == [[1, 1]] * 3

    def both(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: fn(x, x), lambda x: fn(x, -x), x)

    assert jax.jit(jax.value_and_grad(both))(_x())[1].tolist() == (2 * _x()).tolist()
    assert jax.jit(both)(-_x()) == -(_x() ** 2).sum()
    square = jax.jit(jax.grad(jax.checkpoint(lambda x: fn(x, x))))
    assert square(_x()).tolist() == (2 * _x()).tolist()


kept: list[Any] = []


def _keeps(x: Any) -> Any:
    kept.append(x[2:])
    return x * 1


def _keeps_and_fails(x: Any) -> Any:
    kept.append(x.numpy())
    raise RuntimeError("nobody reads this")


def _fails(x: Any) -> Any:
    raise KeyError("the words of torch")


ERRORS: dict[str, tuple[Any, str]] = {
    "keeps a view": (_keeps, "keeps none of its arguments.* still holds argument 0 .*Clone what you keep"),
    "keeps an array, fails": (_keeps_and_fails, "still holds argument 0 "),
    "fails": (_fails, r"KeyError: 'the words of torch'\n(.*\n)*.*in _fails"),
    "writes": (lambda x: x.mul_(2), "OptionError: argument 0 .*got one that it wrote to"),
    "size": (lambda x: x.repeat(1000), r"ShapeError: result 0 .*expected \(8,\), got \(8000,\)"),
    "rank": (lambda x: x[None], r"expected \(8,\), got \(1, 8\)"),
    "type": (lambda x: x.double(), r"DtypeError: result 0 .*expected torch\.float32, got torch\.float64"),
    "number": (lambda x: (x, x), "expected 1 results, got 2"),
    "sparse": (lambda x: x.to_sparse(), "expected a dense tensor"),
    "no tensor": (lambda x: 3.0, "expected tensors, .* got a float"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    fn, message = ERRORS[case]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(from_torch(fn, results=EIGHT))(_x()).block_until_ready()
    kept.clear()


def test_writes_are_found_before_they_spoil_anything() -> None:
    x = _x()
    with pytest.raises(ValueError, match="got one that it wrote to"):
        jax.jit(from_torch(lambda x: x.mul_(2)))(x)
    assert x.tolist() == _x().tolist()


def test_backward_is_watched_too() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            kept.append(grad)
            return grad * 2

    run = jax.jit(jax.grad(lambda x: (from_torch(Spoils.apply)(x) * _x()).sum()))
    with pytest.raises(jax.errors.JaxRuntimeError, match="still holds argument 1 "):
        run(_x()).block_until_ready()
    kept.clear()


def test_cycles_hold_nothing() -> None:
    def fn(x: Any) -> Any:
        cycle = [x]
        cycle.append(cycle)  # type: ignore[arg-type]
        return x * 2

    assert jax.jit(from_torch(fn))(_x()).tolist() == (2 * _x()).tolist()


def test_arguments_may_come_back() -> None:
    same, part = jax.jit(from_torch(lambda x: (x, x[::2])))(_x())
    assert (same.tolist(), part.tolist()) == (_x().tolist(), _x()[::2].tolist())


class _Adds:
    """Unlike a function it is known to be in no cycle."""

    __name__ = "adds"

    def __call__(self, x: Any) -> Any:
        return x + 1


def test_functions_live_as_long_as_their_programs() -> None:
    adds = _Adds()
    gone, run = weakref.ref(adds), jax.jit(from_torch(adds))
    assert run(run(_x())).tolist() == (_x() + 2).tolist()
    program = run.lower(_x()).compile()
    del adds, run
    jax.clear_caches()
    gc.collect()
    assert program(_x()).tolist() == (_x() + 1).tolist()
    keys = set(_torch_calls._functions)
    del program
    gc.collect()
    assert gone() is None
    assert set(_torch_calls._functions) < keys


def test_programs_of_other_processes_are_refused() -> None:
    assert "got one of another" in str(_torch_calls._on_buffers(-1, [], []))


def test_threads() -> None:
    """Callers wait for XLA while its threads wait for Python; torch's threads need it too."""

    def fn(x: Any) -> Any:
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append((x @ x).sum()))
        other.start()
        other.join()
        return x @ x + 0 * found[0]

    like = jax.ShapeDtypeStruct((64, 64), "float32")
    call = from_torch(fn, results=like)
    run = jax.jit(lambda x: call(jnp.sin(x)) + call(jnp.cos(x)))
    x = jnp.full((64, 64), 0.25)
    want, same = np.asarray(run(x)), []

    def work() -> None:
        found = [run(x) for _ in range(10)]
        same.extend((np.asarray(y) == want).all() for y in found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert same == [True] * 50


def test_meshes_and_bare_handlers() -> None:
    """In a process with four devices, where nobody has told the compiled module whom to call."""
    job = Path(__file__).parent / "torch_buffer_jobs.py"
    found = json.loads(run_program(str(job), timeout=120, JAX_PLATFORMS="cpu").splitlines()[-1])
    assert "expected a function from set_xla_callback, got none" in found.pop("no function")
    assert "INVALID_ARGUMENT: attribute key: expected int64" in found.pop("no key")
    assert "TypeError: deliberate" in found.pop("raises")
    for name, (got, want) in found.items():
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
