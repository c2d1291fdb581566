"""attnspan with one framework, with the other, with neither: each in a process of its own."""

import os
import subprocess
import sys

import pytest

# A framework that no finder finds is one that is not installed.
HIDE = """
import sys
class Hidden:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
def hide(*names):
    sys.meta_path[:] = [Hidden(finder, names) for finder in sys.meta_path]
def loaded():
    return sorted({"torch", "jax", "jaxlib"} & set(sys.modules))
"""

TORCH = """
import torch
from attnspan import alibi, causal, segments, window
from attnspan.torch import attention, explain
q = torch.randn(1, 2, 6, 8, requires_grad=True)
mask = causal() & segments(torch.tensor([0, 0, 0, 1, 1, 1]))
out = attention(q, q, q, mask=mask, bias=alibi(torch.ones(2)), dropout_p=0.1, dropout_seed=torch.tensor(1))
out.sum().backward()
assert q.grad.isfinite().all()
assert "runs" in str(explain(q, q, q, mask=mask))
(causal() & window(2)).prepare(6, 6, like=q).show(6)
"""

JAX = """
import jax
import jax.numpy as jnp
from attnspan import alibi, causal, segments, window
from attnspan.jax import attention, dot_product_attention, explain
q = jax.random.normal(jax.random.key(0), (1, 2, 6, 8))
mask = causal() & segments(jnp.array([0, 0, 0, 1, 1, 1]))
def loss(q):
    given = {"bias": alibi(jnp.ones(2)), "dropout_p": 0.1, "dropout_seed": jnp.array(1)}
    return attention(q, q, q, mask=mask, **given).sum()
for backend in (None, "xla", "math"):
    assert jnp.isfinite(jax.jit(jax.grad(loss))(q)).all()
assert jnp.isfinite(dot_product_attention(q, q, q, is_causal=True)).all()
assert "runs" in str(explain(q, q, q, mask=mask))
(causal() & window(2)).prepare(6, 6, like=q).show(6)
"""

NEITHER = """
import numpy as np
import attnspan as a
from attnspan import library, reference
mask = a.causal() & a.segments(np.array([0, 0, 1]))
bounds = mask.prepare(3, 3).lowered.bounds
q = np.ones((1, 1, 3, 4))
out, _ = reference.forward(q, q, q, bounds, 0.5, a.options.Options())
assert np.allclose(out, 1)
mask.show(3)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def printed(code: str, *arguments: str) -> str:
    done = python(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("absent", [True, False], ids=["JAX absent", "JAX there"])
def test_torch_without_jax(absent: bool) -> None:
    hide = "hide('jax', 'jaxlib')\n" if absent else ""
    assert printed(f"{hide}{TORCH}print(loaded())") == "['torch']"


@pytest.mark.slow
@pytest.mark.parametrize("absent", [True, False], ids=["torch absent", "torch there"])
def test_jax_without_torch(absent: bool) -> None:
    hide = "hide('torch')\n" if absent else ""
    assert printed(f"{hide}{JAX}print(loaded())") == "['jax', 'jaxlib']"


def test_without_either() -> None:
    assert printed(f"hide('torch', 'jax', 'jaxlib')\n{NEITHER}print(loaded())") == "[]"


def test_show_without_either() -> None:
    code = "hide('torch', 'jax', 'jaxlib')\nfrom attnspan.cli import main\nmain()"
    done = python(code, "show", "causal & (window(2) | global_keys(1))", "--q-len", "8")
    assert done.returncode == 0, done.stderr
    assert "8 queries x 8 keys" in done.stdout


MISSING = {
    "attnspan.torch": (
        "torch",
        "import attnspan.torch",
        "attnspan.torch: expected torch, got no such package. Run pip install 'attnspan[torch]'.",
    ),
    "attnspan.jax": (
        "jax",
        "import attnspan.jax",
        "attnspan.jax: expected jax, got no such package. Run pip install 'attnspan[jax]'.",
    ),
    "call_jax": (
        "jax",
        "import torch, attnspan.torch\nattnspan.torch.call_jax(lambda x: x, torch.zeros(2))",
        "attnspan.torch.call_jax: expected jax, got no such package. Run pip install 'attnspan[jax]'.",
    ),
    "from_torch": (
        "torch",
        "import attnspan.jax\nattnspan.jax.from_torch(lambda x: x)",
        "attnspan.jax.from_torch: expected torch, got no such package. Run pip install 'attnspan[torch]'.",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_named(what: str) -> None:
    absent, code, message = MISSING[what]
    attempt = "\n ".join(code.splitlines())
    done = python(
        f"hide({absent!r}, {absent + 'lib'!r})\ntry:\n {attempt}\nexcept ImportError as e:\n print(e.name, e)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{absent} {message}"


def test_neither_the_compiler_nor_dtensors_are_loaded_before_they_are_used() -> None:
    heavy = "{'torch._dynamo', 'torch.distributed.tensor', 'sympy'}"
    done = python(f"import attnspan.torch\nprint(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line_names_the_extra() -> None:
    done = python("hide('torch')\nfrom attnspan.cli import main\nmain()", "bench")
    assert done.returncode == 2
    assert "torch is not installed: pip install 'attnspan[" in done.stderr


def test_hiding_hides() -> None:
    done = python("hide('json')\nsys.modules.pop('json', None)\nimport json")
    assert "ModuleNotFoundError: No module named 'json'" in done.stderr
