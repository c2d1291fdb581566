"""The doctor's command finds out that a model is in JAX, and says what a factory must return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax_costs
import jax_right
import pytest
from jax_runner import RIGHT, as_users_do
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.cli import build_app
from attnspan_lab.doctor.jax.subject import is_jax, jax_subject

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_the_command_finds_out_that_it_is_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    files = {name: tmp_path / f"found.{name}" for name in ("json", "junit", "page")}
    options = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    limits = ["--stages", "compiled", "--max-recompiles", "0"]
    made = CliRunner().invoke(build_app(), ["doctor", "jax_costs:number_of_a_weak_type", *limits, *options])
    assert made.exit_code == 1, made.output
    assert "over the limit: recompiles: 1, at most 0" in made.output
    assert "the same results" in " ".join(made.output.split())
    (found,) = json.loads(files["json"].read_text())["findings"]
    assert found["kind"] == "recompile"
    assert found["places"][0]["file"] == jax_costs.__file__
    assert int(ElementTree.parse(files["junit"]).getroot().get("failures") or 0) >= 1
    assert "jnp.asarray(x, dtype)" in files["page"].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", jax_right.WHOLE)
def test_models_of_flax_and_functions_are_jax(name: str) -> None:
    with as_users_do():
        assert is_jax(RIGHT[name]())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((abs, []), "no batch"),
        ((abs, [{"x": 1}], {"casual": True}), "casual"),
        ((abs, 3), "int"),
    ],
)
def test_what_a_factory_must_return_is_said(made: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        jax_subject(made, "made")
