"""attnspan with one framework, with the other, with neither: each in a process of its own."""

import pytest
from programs import run_program

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
def show():
    sys.meta_path[:] = [x.finder for x in sys.meta_path]
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

# It has to know the operators of attnspan, whichever of the two is imported first. A formula of the user
# comes first.
COUNT = """
from torch.utils.flop_counter import FlopCounterMode
import torch, attnspan.torch
q = torch.zeros(1, 1, 4, 8, requires_grad=True)
mine = {"custom_mapping": {torch.ops.attnspan.attention: lambda *_, **__: 7}}
for x, options, want in ((q, {}, 4 * 16 * 8), (q.detach(), {}, 4 * 16 * 8), (q, mine, 7)):
    with FlopCounterMode(display=False, **options) as counter:
        out = attnspan.torch.attention(x, x, x)
    assert counter.get_total_flops() == want
"""

#: What takes long to load, and is loaded when it is used.
HEAVY = {"torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter", "triton", "sympy"}

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
assert jnp.isfinite(jax.jit(jax.grad(loss))(q)).all()
assert jnp.isfinite(dot_product_attention(q, q, q, is_causal=True)).all()
assert "runs" in str(explain(q, q, q, mask=mask))
(causal() & window(2)).prepare(6, 6, like=q).show(6)
"""

NEITHER = """
import numpy as np
import attnspan as a
from attnspan import library, reference
from attnspan.call.options import Options
from attnspan.masks import picture
mask = a.causal() & a.segments(np.array([0, 0, 1]))
bounds = mask.prepare(3, 3).lowered.bounds
q = np.ones((1, 1, 3, 4))
out, _ = reference.forward(q, q, q, bounds, 0.5, Options())
assert np.allclose(out, 1)
mask.show(3)
mask.prepare(3, 3)._repr_svg_()
"""


def printed(code: str) -> list[str]:
    environment = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return run_program("-c", HIDE + code, timeout=120, errors=True, **environment).splitlines()


def missing(package: str, *attempts: str) -> str:
    """Code that makes each attempt, and fails unless its error names the package and the extra."""
    code = ""
    for attempt in attempts:
        what = attempt.partition("(")[0].removeprefix("import ")
        message = f"{what}: expected {package}, got no such package. Run pip install 'attnspan[{package}]'."
        code += f"""
try:
    {attempt}
except ImportError as e:
    assert (e.name, str(e)) == ({package!r}, {message!r}), e
else:
    raise SystemExit('none')
"""
    return code


COMMAND = """
from attnspan_lab.cli import main
sys.argv[1:] = {!r}.split()
try:
    main()
except SystemExit as done:
    assert done.code in (None, {}), done.code
"""


@pytest.mark.slow
def test_torch_without_jax() -> None:
    light = f"import attnspan.torch\nassert not {HEAVY} & set(sys.modules)\n"
    lazy = missing("jax", "import attnspan.jax", "attnspan.torch.call_jax(lambda x: x, q)")
    code = f"{light}{COUNT}{TORCH}print(loaded())\nhide('jax', 'jaxlib')\n{TORCH}{lazy}print(loaded())"
    assert printed(code).count("['torch']") == 2


@pytest.mark.slow
def test_jax_without_torch() -> None:
    lazy = missing("torch", "import attnspan.torch")
    code = f"{JAX}print(loaded())\nhide('torch')\n{JAX}{lazy}print(loaded())\nshow()\n{COUNT}"
    assert printed(code).count("['jax', 'jaxlib']") == 2


@pytest.mark.slow
def test_without_either() -> None:
    show = COMMAND.format("show causal&(window(2)|global_keys(1)) --q-len 8", 0)
    bench = COMMAND.format("bench", 2)
    said = printed(f"hide('torch', 'jax', 'jaxlib')\n{NEITHER}{show}{bench}print(loaded())")
    assert said[-1] == "[]"
    for text in ("8 queries x 8 keys", "torch is not installed: pip install ./lab"):
        assert any(text in line for line in said)
