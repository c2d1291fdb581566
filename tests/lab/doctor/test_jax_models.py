"""The doctor says nothing wrong about healthy models in JAX, and its command takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax_models
import pytest
from typer.testing import CliRunner

from attnspan.errors import OptionError
from attnspan_lab.cli import build_app
from attnspan_lab.doctor import Finding
from attnspan_lab.doctor.findings import merged
from attnspan_lab.doctor.jax import STAGES
from attnspan_lab.doctor.jax.subject import is_jax, jax_subject

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("model", jax_models.MODELS)
def test_healthy_models_only_store_scores_at_the_users_own_line(model: Callable[[], Any]) -> None:
    found: list[Finding] = []

    def say(**what: Any) -> None:
        found.extend([what["finding"]] if "finding" in what else [])

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        made = model()
        assert is_jax(made)
        for stage in ("eager", "compiled", "parity"):
            STAGES[stage](jax_subject(made, "made"), say, "")
    (cost,) = merged(found)
    assert cost.kind == "unfused"
    assert cost.places[0].file == jax_models.__file__


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_the_command_finds_out_that_it_is_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    files = {name: tmp_path / f"found.{name}" for name in ("json", "junit", "page")}
    options = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    target = "jax_patients:sick_weak_type"
    limits = ["--stages", "compiled", "--max-recompiles", "0"]
    made = CliRunner().invoke(build_app(), ["doctor", target, *limits, *options])
    assert made.exit_code == 1, made.output
    assert "over the limit: recompiles: 1, at most 0" in made.output
    assert "the same results" in " ".join(made.output.split())
    (found,) = json.loads(files["json"].read_text())["findings"]
    assert found["kind"] == "recompile"
    assert found["places"][0]["file"].endswith("jax_patients.py")
    assert int(ElementTree.parse(files["junit"]).getroot().get("failures") or 0) >= 1
    assert "jnp.asarray(x, dtype)" in files["page"].read_text()


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
