"""The registry of backends: what registers runs, where it was asked for, and nothing else runs."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpointing import checkpointed
from programs import run_program
from recipe import followed

import attnspan
from attnspan import causal, segments
from attnspan import jax as ours_in_jax
from attnspan import torch as ours
from attnspan.backends import Backend, defaults, load, register, table
from attnspan.errors import BackendError, DtypeError, OptionError

MASK = causal() & segments(torch.tensor([0, 0, 0, 1, 1, 1, 1]))


def qkv() -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 7, 8, generator=make, requires_grad=True) for h in (4, 2, 2)]


def _step(call: Any, inputs: Any, **options: Any) -> list[torch.Tensor]:
    out, lse = call(*inputs, mask=MASK, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), inputs)]


def _in_a_block(call: Any) -> Any:
    def run(*args: Any, **given: Any) -> Any:
        with attnspan.backend("mine"):
            return call(*args, **{**given, "backend": None})

    return run


WAYS = {
    "eager": lambda call: call,
    "a block": _in_a_block,
    "compiled": lambda call: torch.compile(call, backend="aot_eager", fullgraph=True),
    "checkpoint": lambda call: (
        lambda *args, **given: checkpointed("selective", partial(call, **given), *args)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_contributing_makes_a_backend_of_torch_that_runs(way: str) -> None:
    inputs = qkv()
    wanted = _step(ours.attention, inputs, backend="math")
    with followed("torch") as runs:
        assert ours.explain(*inputs, mask=MASK, backend="mine").backend == "mine"
        assert runs.total() == 0
        torch.testing.assert_close(_step(WAYS[way](ours.attention), inputs, backend="mine"), wanted)
        assert runs.total() == 2, "forward once, and backward once"


def test_it_runs_once_without_gradients_and_for_all_mapped_calls() -> None:
    inputs, call = qkv(), partial(ours.attention, mask=MASK, backend="mine")
    wanted = ours.attention(*inputs, mask=MASK, backend="math").detach()
    with followed("torch") as runs:
        mapped = torch.vmap(lambda q, k, v: call(q[None], k[None], v[None])[0])(*inputs)
        torch.testing.assert_close(mapped, wanted)
        with torch.inference_mode():
            torch.testing.assert_close(call(*inputs), wanted)
        assert runs.total() == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "jit", "vmap"])
def test_contributing_makes_a_backend_of_jax_that_runs(way: str) -> None:
    inputs = [jnp.asarray(x.detach().numpy()) for x in qkv()]
    mask = causal() & segments(jnp.array([0, 0, 0, 1, 1, 1, 1]))

    def loss(backend: str, *inputs: Any) -> Any:
        out, lse = ours_in_jax.attention(*inputs, mask=mask, return_lse=True, backend=backend)
        return (out**2).sum() + jnp.sin(lse).sum()

    step = jax.value_and_grad(loss, (1, 2, 3))
    ways = {"eager": step, "jit": jax.jit(step, static_argnums=0), "vmap": jax.vmap(step, (None, 0, 0, 0))}
    given = [x[:, None] for x in inputs] if way == "vmap" else inputs
    with followed("jax") as runs:
        assert ours_in_jax.explain(*inputs, mask=mask, backend="mine").backend == "mine"
        found = ways[way]("mine", *given)
        assert runs.total() >= 2, "forward and backward were traced"
    wanted = ways[way]("math", *given)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)


def test_a_backend_of_jax_under_a_taken_name_is_no_program_of_the_former() -> None:
    x = jnp.ones((1, 1, 4, 8))
    for _ in range(2):
        with followed("jax") as runs:
            ours_in_jax.attention(x, x, x, backend="mine")
            assert runs.total() == 1
        with pytest.raises(OptionError, match=r"backend: expected None or one of .*got 'mine'"):
            ours_in_jax.attention(x, x, x, backend="mine")


def test_options_that_it_has_not_are_refused() -> None:
    call, seed = partial(ours.attention, *qkv(), backend="mine"), {"dropout_seed": torch.tensor(1)}
    options = {"softcap": 2.0, "sinks": torch.zeros(4), "bias": torch.zeros(7, 7), "dropout_p": 0.5}
    with followed("torch") as runs:
        for name, value in options.items():
            kind = name.removesuffix("_p")
            with pytest.raises(BackendError, match=f"mine: it does not compute the option {kind}"):
                call(**{name: value}, **(seed if kind == "dropout" else {}))
        call(dropout_p=0.0, **seed)
        assert runs.total() == 1


def _backend(**changes: Any) -> Backend:
    functions: Any = dict.fromkeys(("forward", "backward"), print)
    return Backend(**{"name": "other", "supports": lambda *_: None, **functions, **changes})


def test_the_newest_default_runs_first_and_the_fast_path_makes_way() -> None:
    runs = []
    cpu = table("torch")["cpu"]

    def forward(part: Any, out: Any) -> Any:
        runs.append(part)
        return cpu.forward(part, out)

    x = torch.randn(1, 2, 4, 8)
    with register(_backend(forward=forward, default_on=("cpu",))):
        assert defaults("torch", "cpu") == ("other", "cpu", "math")
        found = ours.explain(x, x, x)
        assert (found.backend, found.refusals["cpu"]) == ("other", "slower than other")
        ours.attention(x, x, x)
        assert len(runs) == 1
        ours.attention(x, x, x, backend="cpu")
        assert len(runs) == 1
    assert ours.explain(x, x, x).backend == "cpu"
    with register(_backend(default_on=("cpu",)), last=True):
        assert ours.explain(x, x, x).backend == "cpu"
    with register(_backend(default_on=("cuda",))):
        assert defaults("torch", "cpu") == ("cpu", "math")


def test_a_default_that_refuses_leaves_the_call_to_the_next() -> None:
    x = torch.randn(1, 2, 4, 8)
    with register(_backend(default_on=("cpu",), limit=lambda _: "it is busy")):
        found = ours.explain(x, x, x)
        assert (found.backend, found.refusals["other"]) == ("cpu", "it is busy")
        assert ours.attention(x, x, x).shape == x.shape
        assert ours.explain(x, x, x, backend="other").backend == "other"
    with register(_backend(opt_in="it is new")):
        assert ours.explain(x, x, x).refusals["other"] == "it is new"


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(DtypeError, match=r"register: expected a Backend, got str\. Call register\(Backend"):
        register("mine")  # type: ignore[arg-type]
    for framework in ("torch", "jax"):
        with pytest.raises(OptionError, match=f"no backend of {framework} has, got 'cpu'. Choose another"):
            register(_backend(name="cpu", framework=framework))
    for changes, message in (
        ({"name": 3}, "Backend: name: expected a str, got int"),
        ({"name": ""}, "Backend: name: expected a name, got ''"),
        ({"default_on": "cpu"}, "Backend: default_on: expected a tuple of str, got str"),
        ({"forward": None}, "Backend: forward: expected a function, got NoneType"),
        ({"limit": 3}, "Backend: limit: expected a function, got int"),
        ({"framework": "numpy"}, "Backend: framework: expected 'torch' or 'jax', got 'numpy'"),
        ({"layouts": ("thd",)}, r"Backend: layouts: expected 'bhsd', 'bshd' or both, got \('thd',\)"),
        ({"backward": None}, "Backend: backward: expected a function, because torch calls it, got None"),
    ):
        with pytest.raises((OptionError, DtypeError), match=message):
            _backend(**changes)
    assert _backend(backward=None, framework="jax").backward is None


def test_a_wrong_lse_is_no_result() -> None:
    x = torch.randn(1, 2, 4, 8)
    wrong = _backend(forward=lambda *_: torch.zeros(4))
    with register(wrong), pytest.raises(ValueError, match=r"backend='other': lse: expected \(1, 2, 4\), got"):
        ours.attention(x, x, x, backend="other")


#: What its backward returns => the error.
WRONG = {
    "expected a tuple of the gradients of bias and sinks, got NoneType": None,
    "expected a tensor, got NoneType": (None, None),
    r"expected \(1, 1, 4, 4\), got \(1,\)": (torch.ones(1), None),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_gradients_are_no_result(message: str) -> None:
    x, bias = torch.randn(1, 2, 4, 8), torch.zeros(4, 4, requires_grad=True)
    cpu = table("torch")["cpu"].forward
    wrong = _backend(forward=cpu, backward=lambda *_: WRONG[message], options=("bias",))
    with register(wrong), pytest.raises((ValueError, TypeError), match=f"backend='other': .*{message}"):
        ours.attention(x, x, x, bias=bias, backend="other").sum().backward()


def test_threads_lose_no_registration() -> None:
    names = [f"b{i}" for i in range(8)]
    start, before, interval = threading.Barrier(8), dict(table("torch")), sys.getswitchinterval()

    def add(name: str) -> Any:
        start.wait()
        return register(_backend(name=name))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(20):
                made = list(pool.map(add, names))
                assert set(table("torch")) == {*before, *names}
                list(pool.map(lambda x: x.remove(), made))
                assert dict(table("torch")) == before
    finally:
        sys.setswitchinterval(interval)


class _Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ours.attention(x, x, x, mask=causal(), backend="mine")


def test_a_program_of_a_removed_backend_says_what_it_needs() -> None:
    x = torch.randn(1, 2, 4, 8)
    with followed("torch"):
        program = torch.export.export(_Layer(), (x,)).module()
        wanted = program(x)
    with pytest.raises(ValueError, match=r"backend: expected one of .*got 'mine'. Register it by attnspan"):
        program(x)
    with followed("torch") as runs:
        torch.testing.assert_close(program(x), wanted)
        assert runs.total() == 1


def test_a_removed_backend_is_gone_and_no_other_is_removed() -> None:
    first = register(_backend())
    first.remove()
    assert "other" not in table("torch")
    with register(_backend()):
        first.remove()
        assert "other" in table("torch")


def test_entry_points_register(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str) -> list[Any]:
        assert group == "attnspan.backends.torch"
        loaded = "no backend", _backend(name="theirs")
        return [SimpleNamespace(name="theirs", value="a:B", load=lambda x=x: x) for x in loaded]

    monkeypatch.setattr(attnspan.backends, "entry_points", found)
    monkeypatch.setattr(attnspan.backends, "_loaded", {"jax"})
    text = "entry point 'theirs' of attnspan.backends.torch registers no backend"
    with pytest.warns(UserWarning, match=text):
        load("torch")
    load("torch")
    assert next(iter(table("torch"))) == "theirs"
    attnspan.backends.Registration(table("torch")["theirs"]).remove()


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_module_of_an_entry_point_may_import_attention(framework: str, tmp_path: Path) -> None:
    made = f"Backend(name='theirs', framework={framework!r}, supports=print, forward=print, backward=print)"
    imports = f"from attnspan.{framework} import attention\nfrom attnspan.backends import Backend"
    (about := tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs.py").write_text(f"{imports}\nBACKEND = {made}\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[attnspan.backends.{framework}]\ntheirs = theirs:BACKEND\n")
    program = f"import attnspan.{framework}; print(*attnspan.backends.table({framework!r}))"
    said = run_program("-W", "error::UserWarning", "-c", program, PYTHONPATH=str(tmp_path))
    assert said.startswith("theirs ")
