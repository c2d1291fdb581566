"""The rows of `attnspan.call.schema` and what is derived from them."""

from pathlib import Path

import numpy as np
import pytest
from programs import run_program

from attnspan import reference
from attnspan.call import schema
from attnspan.call.options import Options

DOCS = Path(__file__).parents[1] / "docs"
SIZES = {"b": 2, "h": 4, "g": 2, "q": 3, "k": 5, "d": 4, "e": 6, "r": 2, "n": 7, "2": 2}


def _sample(row, kind, rng):
    """An array of a row, with its dtype, whose values change results."""
    shape = [SIZES[axis[0]] for axis in schema.axes(row.name, kind)]
    if row.name in ("q_index", "k_index"):  # other indices for each batch element, not the default ones
        return np.cumsum(rng.integers(1, 4, shape), 1).astype("int32")
    if row.dtype.startswith("int"):
        return rng.integers(0, 2**40, shape)
    return rng.standard_normal(shape).astype("float32")


def _samples(kind):
    rng, rows = np.random.default_rng(0), schema.arrays((*schema.INPUTS, *schema.OPTIONS))
    found = {row.name: _sample(row, kind, rng) for row in rows if row.name != "bounds"}
    found["bounds"] = np.array([[0, 3], [4, 5]], "int32") * np.ones((2, 4, 3, 1, 1), "int32")
    return found | {"scale": 0.5, "softcap": 3.0, "bias_kind": kind, "dropout_p": 0.25}


@pytest.mark.parametrize("kind", [schema.SIGNED_ALIBI, schema.DISTANCE, schema.DENSE])
@pytest.mark.parametrize("name", [row.name for row in schema.OPTIONS if not row.serves] + ["all"])
def test_the_compiled_module_reads_the_arguments_in_this_order(name, kind):
    torch = pytest.importorskip("torch")
    op = pytest.importorskip("attnspan.torch.ops").forward_op
    every, index = _samples(kind), ("q_index", "k_index")
    served = {"bias": ("bias_kind", *index), "dropout_p": ("dropout_seed", *index)}
    chosen = {name, *served.get(name, ())}
    inputs = [every[row.name] for row in schema.INPUTS]
    options = [every[x.name] if name == "all" or x.name in chosen else x.default for x in schema.OPTIONS]
    args = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (*inputs, *options)]
    for found, wanted in zip(op(*args), reference.forward(*inputs, Options(*options)), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


SHAPES = {"b": "B", "h": "Hq", "g": "Hkv", "q": "Sq", "k": "Sk", "d": "D", "e": "Dv", "n": "n"}
BIASES = {schema.ALIBI: "`alibi`", schema.DISTANCE: "`relative`", schema.DENSE: "dense"}


def _shape(words):
    letters = [SHAPES[axis[0]] + " or 1" * axis.endswith("?") for axis in words.split()]
    return f"({', '.join(letters)}{',' * (len(letters) == 1)})"


def _line(row):
    if isinstance(row, schema.Number):
        return f"| `{row.name}` | number | | no | `{row.unset}` |"
    kinds = [("", row.axes)] if isinstance(row.axes, str) else [x for x in row.axes if x[0] in BIASES]
    shapes = ["()"] * row.single + [f"{BIASES.get(kind, '')} {_shape(x)}".strip() for kind, x in kinds]
    dtype = "floating" if row.dtype in ("q", "float32") else "integer"
    return f"| `{row.name}` | {dtype} | {' or '.join(shapes)} | {'yes' if row.grad else 'no'} | `None` |"


def test_the_page_of_options_has_the_rows():
    rows = [row for row in schema.OPTIONS if getattr(row, "unset", None) is not schema.HIDDEN]
    head = "| option | values | shape | gradient | default |\n|---|---|---|---|---|\n"
    assert head + "\n".join(map(_line, rows)) + "\n" in (DOCS / "options.md").read_text()


ROUTES = {
    "torch": ["eager", "compile", "vmap", "DTensor, plan"],
    "jax": ["eager", "jit", "vmap", "mesh"],
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ROUTES)
def test_one_row_and_one_line_of_reference_carry_an_option_everywhere(framework):
    pytest.importorskip(framework)
    said = run_program(str(Path(__file__).parent / "samples/fake_option.py"), framework)
    assert said.splitlines() == ROUTES[framework]
