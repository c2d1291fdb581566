"""Calls that cannot work, and what they say."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from samples import mistakes
from samples.mistakes import call, check, error_of
from xla_cells import on_xla

import attnspan as a
from attnspan.errors import DeviceError, DtypeError, OptionError
from attnspan.xla import attention

Q = torch.zeros(1, 2, 6, 8)
IDS = torch.zeros(1, 6, dtype=torch.int64)


def test_tensors_elsewhere() -> None:
    q = on_xla(Q)
    for inputs, given, text in (
        ((Q, Q, Q), {}, r'q: expected an XLA tensor, got a tensor on cpu.*\.to\("xla"\)'),
        ((q, q, Q), {}, "v: expected an XLA tensor"),
        ((q, q, q), {"mask": a.segments(IDS)}, r"q_ids: expected device xla:0 \(as q\), got cpu"),
        ((q, q, q), {"sinks": torch.zeros(2)}, "sinks: expected device xla:0"),
        ((q, q, q), {"q_index": torch.arange(6)}, "q_index: expected device xla:0"),
    ):
        with pytest.raises(DeviceError, match=text):
            attention(*inputs, **given)
    ids = np.array([[0, 0, 1, 1, 1, 2]])  # Arrays of NumPy are moved.
    got = attention(q, q, q, mask=a.segments(ids))
    assert torch.equal(got.cpu(), attention(q, q, q, mask=a.segments(on_xla(torch.from_numpy(ids)))).cpu())


def _moved(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: on_xla(make(*given))


MADE = {"zeros": torch.zeros, "ones": torch.ones, "arange": torch.arange, "array": torch.tensor}
NAMES = mistakes.namespace(
    **{name: _moved(make) for name, make in MADE.items()}, ids=_moved(lambda *x: torch.zeros(x).long())
)


# There is one way to compute, so no backend to name.
@pytest.mark.parametrize(
    "mistake", [x for x in mistakes.rows(mistakes.CALLS) if "backend=" not in x.code], ids=repr
)
def test_a_wrong_call_says_what_how_and_why(mistake: mistakes.Mistake) -> None:
    check(error_of(call(mistake, attention, NAMES)), mistake, "tensor")


def test_words_of_other_libraries_and_arrays_of_others() -> None:
    import jax.numpy as jnp

    q, ids = on_xla(Q), jnp.zeros((1, 6), jnp.int32)
    elsewhere = (
        "expected an XLA tensor or a NumPy array, got an array of jax. Convert it with torch.from_dlpack"
    )
    mesh = {"mesh": "m", "partition_spec": ("data", None, None, None)}
    for given, error, text in (
        ({"is_causal": True}, TypeError, r"got is_causal=\. Pass mask=causal\(\)"),
        ({"mask": a.segments(ids)}, DtypeError, f"mask: q_ids: {elsewhere}"),
        ({"mask": a.full().spans(6, 6, like=ids)}, DtypeError, f"mask: bounds: {elsewhere}"),
        ({"q_index": ids[0]}, DtypeError, "q_index: expected an array of torch or NumPy, got one"),
        (
            {"bias": a.alibi(jnp.ones(2))},
            DeviceError,
            "bias: expected arrays of one framework on one device, got torch",
        ),
        (mesh, DtypeError, r"mesh: expected a mesh of torch_xla\.distributed\.spmd, got str"),
    ):
        with pytest.raises(error, match=text):
            attention(q, q, q, **given)
    with pytest.raises(DtypeError, match=r"q: expected a torch\.Tensor, got ndarray"):
        attention(Q.numpy(), q, q)


def test_splitting_needs_spmd_mode() -> None:
    import torch_xla.distributed.spmd as xs

    q, mesh = on_xla(Q), xs.Mesh(np.arange(1), (1,), ("data",))
    with pytest.raises(OptionError, match=r"expected SPMD mode.*use_spmd"):
        attention(q, q, q, mesh=mesh, partition_spec=("data", None, None, None))


@pytest.mark.parametrize("missing", ["torch_xla", "jax"])
def test_without_a_package_the_error_says_what_to_install(missing: str) -> None:
    code = (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *x: None if name == {missing!r} else find(name, *x)\n"
        "import attnspan.xla"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: attnspan.xla: expected" in done.stderr
    assert "make test-xla" in done.stderr
    assert "pip install torch==2.9.0 torch_xla==2.9.0 jax==0.7.1" in done.stderr
