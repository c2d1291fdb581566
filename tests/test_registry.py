"""The registry of backends: what registers runs, where it was asked for, and nothing else runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
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


@pytest.mark.parametrize("way", ["eager", "a block", "compiled", "vmap", "inference", "checkpoint"])
def test_contributing_makes_a_backend_of_torch_that_runs(way: str) -> None:
    inputs, options = qkv(), {"backend": "mine"}
    call: Any = ours.attention
    if way == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    wanted = _step(ours.attention, inputs, backend="math")
    with followed("torch") as runs:
        assert ours.explain(*inputs, mask=MASK, **options).backend == "mine"
        assert runs.total() == 0
        if way == "vmap":
            lift = torch.vmap(lambda q, k, v: call(q[None], k[None], v[None], mask=MASK, **options)[0])
            torch.testing.assert_close(lift(*inputs), wanted[0])
            assert runs.total() == 1, "one call for all batch elements"
        elif way == "inference":
            with torch.inference_mode():
                torch.testing.assert_close(call(*inputs, mask=MASK, **options), wanted[0].detach())
            assert runs.total() == 1
        else:
            if way == "a block":
                with attnspan.backend("mine"):
                    found = _step(call, inputs)
            elif way == "checkpoint":
                contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts

                def again(*args: Any, **given: Any) -> Any:
                    return torch.utils.checkpoint.checkpoint(
                        lambda *x: call(*x, **given),
                        *args,
                        use_reentrant=False,
                        context_fn=lambda: contexts(ours.checkpoint_policy),
                    )

                found = _step(again, inputs, **options)
            else:
                found = _step(call, inputs, **options)
            torch.testing.assert_close(found, wanted)
            assert runs.total() == 2, "forward once, and backward once"


@pytest.mark.parametrize("way", ["eager", "jit", "vmap"])
def test_contributing_makes_a_backend_of_jax_that_runs(way: str) -> None:
    inputs = [jnp.asarray(x.detach().numpy()) for x in qkv()]
    mask = causal() & segments(jnp.array([0, 0, 0, 1, 1, 1, 1]))

    def loss(backend: str, *inputs: Any) -> Any:
        out, lse = ours_in_jax.attention(*inputs, mask=mask, return_lse=True, backend=backend)
        return (out**2).sum() + jnp.sin(lse).sum()

    step = jax.value_and_grad(loss, (1, 2, 3))
    if way == "jit":
        step = jax.jit(step, static_argnums=0)
    if way == "vmap":
        lifted = jax.vmap(jax.value_and_grad(loss, (1, 2, 3)), (None, 0, 0, 0))
        inputs = [x[:, None] for x in inputs]
        step = lifted
    with followed("jax") as runs:
        arguments = [x[0] for x in inputs] if way == "vmap" else inputs
        assert ours_in_jax.explain(*arguments, mask=mask, backend="mine").backend == "mine"
        found = step("mine", *inputs)
        assert runs.total() >= 2, "forward and backward were traced"
    wanted = step("math", *inputs)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        torch.testing.assert_close(torch.from_dlpack(got), torch.from_dlpack(want), rtol=1e-4, atol=1e-5)


def test_a_backend_of_jax_under_a_taken_name_is_no_program_of_the_former() -> None:
    x = jnp.ones((1, 1, 4, 8))
    with followed("jax"):
        ours_in_jax.attention(x, x, x, backend="mine")
    with pytest.raises(OptionError, match=r"backend: expected None or one of .*got 'mine'"):
        ours_in_jax.attention(x, x, x, backend="mine")
    with followed("jax") as runs:
        ours_in_jax.attention(x, x, x, backend="mine")
        assert runs.total() == 1


def test_options_that_it_has_not_are_refused() -> None:
    q, k, v = qkv()
    with followed("torch") as runs:
        for options in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}, {"bias": torch.zeros(7, 7)}):
            with pytest.raises(
                BackendError, match=f"mine: it does not compute the option {next(iter(options))}"
            ):
                ours.attention(q, k, v, backend="mine", **options)
        seed = torch.tensor(1)
        with pytest.raises(BackendError, match="mine: it does not compute the option dropout"):
            ours.attention(q, k, v, dropout_p=0.5, dropout_seed=seed, backend="mine")
        ours.attention(q, k, v, dropout_p=0.0, dropout_seed=seed, backend="mine")
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


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            None,
            "backend='other': backward: expected a tuple of the gradients of bias and sinks, got NoneType",
        ),
        ((None, None), "backend='other': gradient of bias: expected a tensor, got NoneType"),
        ((torch.ones(1), None), r"backend='other': gradient of bias: expected \(1, 1, 4, 4\), got \(1,\)"),
    ],
)
def test_wrong_gradients_are_no_result(found: Any, message: str) -> None:
    x, bias = torch.randn(1, 2, 4, 8), torch.zeros(4, 4, requires_grad=True)
    wrong = _backend(forward=table("torch")["cpu"].forward, backward=lambda *_: found, options=("bias",))
    with register(wrong), pytest.raises((ValueError, TypeError), match=message):
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


class _Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ours.attention(x, x, x, mask=causal(), backend="mine")


def test_a_removed_backend_is_gone_and_no_other_is_removed() -> None:
    first = register(_backend())
    with pytest.raises(OptionError, match="got 'other'"):
        register(_backend())
    first.remove()
    assert "other" not in table("torch")
    with register(_backend()):
        first.remove()
        assert "other" in table("torch")


class _Point:
    name, value = "theirs", "their.module:BACKEND"

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def load(self) -> Any:
        return self.backend


def test_entry_points_register(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(group: str) -> list[_Point]:
        assert group == "attnspan.backends.torch"
        return [_Point("no backend"), _Point(_backend(name="theirs"))]

    monkeypatch.setattr(attnspan.backends, "entry_points", found)
    monkeypatch.setattr(attnspan.backends, "_loaded", {"jax"})
    text = "entry point 'theirs' of attnspan.backends.torch registers no backend"
    with pytest.warns(UserWarning, match=text):
        load("torch")
    load("torch")
    assert next(iter(table("torch"))) == "theirs"
    attnspan.backends.Registration(table("torch")["theirs"]).remove()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_module_of_an_entry_point_may_import_attention(framework: str, tmp_path: Any) -> None:
    made = f"Backend(name='theirs', framework={framework!r}, supports=print, forward=print, backward=print)"
    imports = f"from attnspan.{framework} import attention\nfrom attnspan.backends import Backend"
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (tmp_path / "theirs.py").write_text(f"{imports}\nBACKEND = {made}\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[attnspan.backends.{framework}]\ntheirs = theirs:BACKEND\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import attnspan.{framework}
print(next(iter(attnspan.backends.table({framework!r}))))
"""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program], capture_output=True, text=True
    )
    assert run.stdout == "theirs\n", run.stderr
