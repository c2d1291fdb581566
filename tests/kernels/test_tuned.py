"""The file of tuned configurations: found, read, handed over; and harmless whatever is in it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import Arrays, Case, budget, error, make

from attnspan.kernels import cpu, tuned
from attnspan.kernels.tuned import Key, cache_path, length_bucket, mask_kind
from attnspan.problem import Problem

KEY = Key("cpu", "forward", "portable", "float32", 64, 10, "half")
COMPILED = pytest.mark.compiled_module("the table is the module's own")
SOURCE = str(Path(tuned.__file__).parents[2])


class Core:
    """A compiled module that remembers its table."""

    def __init__(self) -> None:
        self.table: list[Any] | None = None

    def active_isa(self) -> str:
        return "portable"

    def set_tuned(self, rows: list[Any]) -> None:
        self.table = rows


def content(**changes: Any) -> dict[str, Any]:
    entry = {"key": vars(KEY), "config": {"block_q": 96}, "version": tuned.installed_version()}
    device = tuned.device_name("portable")
    return {"schema": tuned.SCHEMA, "device": device, "entries": [entry | changes]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is looked for; not there yet. Nothing has been loaded."""
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(path))
    monkeypatch.setattr(tuned, "_loaded", None)
    return path


def test_a_good_file_reaches_the_compiled_module(cache: Path) -> None:
    cache.write_text(json.dumps(content()))
    core = Core()
    tuned.load_once(core)
    assert core.table == [("forward", "portable", "float32", 64, 10, "half", 96, 0, 0)]
    assert tuned.in_use() == tuned.Loaded(cache, 1, "")


def test_the_file_is_read_once(cache: Path) -> None:
    cache.write_text(json.dumps(content()))
    tuned.load_once(Core())
    later = Core()
    tuned.load_once(later)
    assert later.table is None


def test_entries_of_other_back_ends_and_of_the_default_are_not_handed_over(cache: Path) -> None:
    value = content()
    value["entries"].append(value["entries"][0] | {"key": vars(KEY) | {"backend": "triton", "isa": "sm90"}})
    value["entries"].append(value["entries"][0] | {"config": {"block_q": 0}})
    cache.write_text(json.dumps(value))
    core = Core()
    tuned.load_once(core)
    assert core.table is not None
    assert len(core.table) == 1


def edited(**changes: Any) -> bytes:
    return json.dumps(content(**changes)).encode()


def whole(**changes: Any) -> bytes:
    return json.dumps(content() | changes).encode()


DAMAGED = {
    "empty": (b"", "expected JSON"),
    "cut short": (edited()[:-20], "expected JSON"),
    "not text": (b"\xff\xfe\x00", "expected JSON"),
    "too deep": (b"[" * 100_000, "expected JSON"),
    "a list": (b"[]", r"expected a JSON object, got \[\]"),
    "an old schema": (whole(schema=0), "expected schema 1, got 0"),
    "a schema that is True": (
        json.dumps(content() | {"schema": True}).encode(),
        "expected schema 1, got True",
    ),
    "another device": (whole(device="z80"), "got those of 'z80'"),
    "no entries": (
        json.dumps(content() | {"entries": None}).encode(),
        "expected a list of entries, got None",
    ),
    "no entry": (whole(entries=[3]), "an object with a version, got 3"),
    "another version": (edited(version="0.0.1"), "got those of 0.0.1"),
    "a key cut short": (edited(key={"backend": "cpu"}), "a key: expected backend, direction"),
    "a key of other types": (edited(key=vars(KEY) | {"head_dim": "64"}), "a key: expected backend"),
    "a bucket too large": (edited(key=vars(KEY) | {"length_bucket": 99}), "length_bucket < 32"),
    "a negative block": (edited(config={"block_q": -1}), "whole numbers from 0 on"),
    "a block that is no number": (edited(config={"block_q": "64"}), "whole numbers from 0 on"),
    "an unknown choice": (edited(config={"tiles": 3}), "expected block_q, block_k, threads"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_bad_file_is_one_warning_and_nothing_else(cache: Path, damage: bytes, message: str) -> None:
    cache.write_bytes(damage)
    core = Core()
    with pytest.warns(tuned.TuningCacheWarning, match=message) as caught:
        tuned.load_once(core)
    tuned.load_once(core)  # where a second warning would be an error
    assert len(caught) == 1
    assert str(cache) in str(caught[0].message)
    assert "attnspan tune" in str(caught[0].message)
    assert not core.table
    loaded = tuned.in_use()
    assert loaded is not None
    assert loaded.configurations == 0


def test_a_path_that_cannot_be_read_is_a_warning(cache: Path) -> None:
    cache.mkdir()
    (cache / tuned.cache_path(tuned.device_name("portable")).name).mkdir()  # type: ignore[union-attr]
    with pytest.warns(tuned.TuningCacheWarning, match="expected a readable file"):
        tuned.load_once(Core())


@COMPILED
def test_what_the_compiled_module_refuses_is_a_warning(cache: Path) -> None:
    cache.write_bytes(edited(key=vars(KEY) | {"isa": "avx1024"}))

    class Real(Core):
        def set_tuned(self, rows: list[Any]) -> None:
            assert cpu._core is not None
            cpu._core.set_tuned(rows)

    with pytest.warns(tuned.TuningCacheWarning, match="isa: expected one of .*, got 'avx1024'"):
        tuned.load_once(Real())


def test_where_warnings_are_errors_it_is_a_line_on_stderr(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("damage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.load_once(Core())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"TuningCacheWarning: {cache}: expected JSON")


@COMPILED
def test_importing_and_calling_work_beside_a_damaged_file(tmp_path: Path) -> None:
    damaged = tmp_path / "tuned.json"
    damaged.write_text("{")
    code = (
        "import numpy as np\n"
        "from attnspan.kernels import cpu\n"
        "x, out, lse = *np.ones((2, 1, 1, 4, 8), 'float32'), np.empty((1, 1, 4), 'float32')\n"
        "bounds = np.tile(np.array([0, 4], 'int32'), (1, 1, 4, 1, 1))\n"
        "cpu.forward(x, x, x, bounds, out, lse, scale=1.0, num_threads=1)\n"
        "assert (out == 1).all()"
    )
    environment = os.environ | {"ATTNSPAN_TUNE_CACHE": str(damaged), "PYTHONPATH": SOURCE}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TuningCacheWarning") == 1
    off = subprocess.run(
        command, env=environment | {"ATTNSPAN_TUNE_CACHE": "off"}, capture_output=True, text=True, check=False
    )
    assert (off.returncode, off.stderr) == (0, "")


def test_an_illegal_level_is_left_to_the_first_call(cache: Path) -> None:
    class Refusing(Core):
        def active_isa(self) -> str:
            raise ValueError("ATTNSPAN_ISA: expected one of the levels")

    cache.write_text("damage")
    tuned.load_once(Refusing())
    assert tuned.in_use() == tuned.Loaded(None, 0, "")


def test_without_a_file_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from attnspan.kernels import tuned\n"
        "class Core:\n"
        "    def active_isa(self): return 'portable'\n"
        "before = set(sys.modules)\n"
        "tuned.load_once(Core())\n"
        "assert tuned.in_use().problem == ''\n"
        "print(sorted(set(sys.modules) - before))"
    )
    environment = os.environ | {"ATTNSPAN_TUNE_CACHE": str(tmp_path / "none.json"), "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tuned-some-cpu-r-2-threads-avx2.json"
    device = "Some CPU (R), 2 threads, avx2"
    monkeypatch.delenv("ATTNSPAN_TUNE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path(device) == tmp_path / "xdg" / "attnspan" / name
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_path(device) == tmp_path / ".cache" / "attnspan" / name
    for given, expected in {
        str(tmp_path): tmp_path / name,
        f"{tmp_path}/new/": tmp_path / "new" / name,
        f"{tmp_path}/mine.json": tmp_path / "mine.json",
        "~/mine.json": tmp_path / "mine.json",
        "off": None,
        "OFF": None,
    }.items():
        monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", given)
        assert cache_path(device) == expected


def test_devices_differ_by_what_tuning_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    name = tuned.device_name("avx2")
    assert name != tuned.device_name("avx512")
    monkeypatch.setattr(tuned, "_usable_threads", lambda: 77)
    assert tuned.device_name("avx2") != name
    assert "77 threads" in tuned.device_name("avx2")


@pytest.fixture
def real_table() -> Any:
    """The compiled module, whose table is empty before and after."""
    assert cpu._core is not None
    cpu._core.set_tuned([])
    yield cpu._core
    cpu._core.set_tuned([])


@COMPILED
@pytest.mark.parametrize("k_len", [1, 2, 3, 511, 512, 513, 65536, 65537])
def test_buckets_are_those_of_the_compiled_module(real_table: Any, k_len: int) -> None:
    place = ("forward", "avx2", "bfloat16", 64)
    real_table.set_tuned([(*place, length_bucket(k_len), "half", 64, 32, 1)])
    assert real_table.tuned_lookup(*place, k_len, "half") == (64, 32, 1)
    assert real_table.tuned_lookup(*place, 2 * k_len, "half") is None
    assert real_table.tuned_lookup(*place, k_len, "dense") is None
    assert real_table.tuned_lookup("backward", *place[1:], k_len, "half") is None


def test_kinds_of_masks() -> None:
    assert [mask_kind(16, 64, 16 * 64), mask_kind(17, 64, 17 * 64)] == ["decode", "dense"]
    assert [mask_kind(100, 100, n) for n in (7500, 7499, 2500, 2499, 0)] == [
        "dense",
        "half",
        "half",
        "sparse",
        "sparse",
    ]


CASES = [
    Case(q_len=300, k_len=520, mask="causal"),
    Case(q_len=130, k_len=1100, runs=3, group=2, kv_heads=1),
    Case(q_len=400, k_len=400, mask="documents", head_dim=128, v_dim=96, kv_heads=1),
    Case(q_len=3, k_len=700, group=4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_configuration_changes_nothing_but_rounding(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    arrays, allowed = make(case), budget(case)
    exact, walk = arrays.oracle(), 2**-24 * max(case.k_len, case.q_len * case.group) ** 0.5
    exponential = 3.3e-6 if dtype == torch.bfloat16 else 6.5e-8  # of its polynomial, see csrc/softmax.h
    for forward, backward in random_configs(case, 6):
        got = run(arrays, forward, backward)
        for name in exact:
            bound = 3 * (allowed[name] + walk + exponential)
            assert error(got[name], exact[name]) <= bound, (forward, backward, name)


def random_configs(case: Case, count: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Pairs of a configuration of forward and one of backward, other ones for each case and dtype."""
    heads, dtype = case.kv_heads * case.group, str(case.dtype).removeprefix("torch.")
    sizes = (case.q_len, case.k_len, case.head_dim, case.v_dim, case.runs)
    problem = Problem(case.batch, heads, case.kv_heads, *sizes, dtype, "cpu")
    choice = random.Random(str(case))
    spaces = [cpu.configs(problem, direction) for direction in ("forward", "backward")]
    assert all(len(space) > 2 for space in spaces)
    return [(choice.choice(spaces[0]), choice.choice(spaces[1])) for _ in range(count)]


def run(arrays: Arrays, forward: dict[str, int], backward: dict[str, int]) -> dict[str, torch.Tensor]:
    """Both directions with explicit configurations; what they do not write stays NaN."""
    case = arrays.case
    out = torch.full((*arrays.q.shape[:3], case.v_dim), torch.nan, dtype=case.dtype)
    lse = torch.full(arrays.q.shape[:3], torch.nan)
    inputs = {"dq": arrays.q, "dk": arrays.k, "dv": arrays.v}
    grads = {name: torch.full_like(x, torch.nan) for name, x in inputs.items()}
    given, options = (arrays.q, arrays.k, arrays.v), {"scale": case.scale, "num_threads": case.threads}
    cpu.forward(*given, arrays.bounds, out, lse, **options, config=forward)
    grad = (arrays.dout, arrays.dlse)
    cpu.backward(*grad, *given, out, lse, arrays.bounds, *grads.values(), **options, config=backward)
    return {"out": out, "lse": lse, **grads}


@COMPILED
def test_calls_look_up_what_was_tuned(real_table: Any) -> None:
    arrays = make(Case(q_len=64, k_len=300, mask="full"))
    plain = arrays.run()
    place = (cpu.isa(), "float32", 64, length_bucket(300), "dense")
    # A block of another size sums in another order, which shows in the last bits.
    forward = {"block_q": cpu._core.blocks("forward", "float32")[0], "block_k": 128, "threads": 0}
    backward = {"block_q": 96, "block_k": 96, "threads": 0}
    table = [("forward", *place, *forward.values()), ("backward", *place, *backward.values())]
    real_table.set_tuned(table)
    looked_up, explicit = arrays.run(), run(arrays, forward, backward)
    own_choice = run(arrays, {"threads": 2}, {"threads": 2})
    for name in ("out", "dq"):
        assert torch.equal(looked_up[name], explicit[name]), name
        assert not torch.equal(looked_up[name], plain[name]), name
        assert torch.equal(own_choice[name], plain[name]), "an explicit configuration overrides the table"
