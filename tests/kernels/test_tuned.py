"""The file of tuned configurations: found, read, handed to the core; harmless whatever it holds."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_run import check_run, run
from problems import Case, make
from programs import run_program

from attnspan.call import Problem
from attnspan.kernels import cpu, tuned
from attnspan.kernels.tuned import Key, cache_path, device_name, header, length_bucket, mask_kind

KEY = Key("cpu", "forward", "portable", "float32", 64, 10, "half")
DEVICE = device_name("portable")
ROW = ("forward", "portable", "float32", 64, 10, "half", 96, 0, 0)
COMPILED = pytest.mark.compiled_module("the table is the module's own")
SOURCE = str(Path(tuned.__file__).parents[2])


class Core:
    """A compiled module that remembers its table."""

    table: Any = None

    def active_isa(self) -> str:
        return "portable"

    def set_tuned(self, rows: list[Any]) -> None:
        self.table = rows


def entry(config: Any = None, **key: Any) -> dict[str, Any]:
    return {"key": vars(KEY) | key, "config": {"block_q": 96} if config is None else config}


def content(*entries: Any, **changes: Any) -> bytes:
    return json.dumps(header(DEVICE) | {"entries": [entry(), *entries]} | changes).encode()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is looked for; not there yet."""
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", str(tmp_path))
    path = cache_path(DEVICE)
    assert path is not None
    return path


def loaded() -> Any:
    core = Core()
    tuned.load(core)
    return core.table


UNUSED = {
    "another backend": entry(backend="triton", isa="sm90"),
    "the default": entry({"block_q": 0}, head_dim=32),
    "no entry": 3,
    "no key": {"config": {"block_q": 96}},
    "a key cut short": {"key": {"backend": "cpu"}, "config": {"block_q": 96}},
    "an unknown part of a key": entry(colour="red"),
    "a key of other types": entry(head_dim="32"),
    "a key that is no name": entry(dtype=["float32"]),
    "a bucket too large": entry(length_bucket=99),
    "a negative block": entry({"block_q": -1}, head_dim=32),
    "a block that is no number": entry({"block_q": "64"}, head_dim=32),
    "a configuration that is no object": entry([96], head_dim=32),
}


@pytest.mark.parametrize("other", UNUSED.values(), ids=UNUSED)
def test_only_well_formed_entries_of_the_kernel_reach_the_core(
    cache: Path, other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_bytes(content(other))
    assert loaded() == [ROW]
    assert not caplog.records


DAMAGED = {
    "empty": (b"", "Expecting value"),
    "cut short": (content()[:-20], "Expecting|Unterminated"),
    "not text": (b"\xff\xfe\x00", "decode"),
    "too deep": (b"[" * 100_000, "recursion"),
    "a list": (b"[]", "'list' object"),
    "another format": (content(schema=1), "expected {'schema': 2, .* got {'schema': 1,"),
    "another device": (content(device="z80"), "got .*'z80'"),
    "another version": (content(version="0.0.1"), "got .*'0.0.1'"),
    "no entries": (content(entries=None), "not iterable"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_bad_file_is_one_line_in_the_log_and_nothing_else(
    cache: Path, damage: bytes, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_bytes(damage)
    with caplog.at_level(logging.WARNING, "attnspan"):
        assert not loaded()
    assert len(caplog.records) == 1
    assert caplog.text.count(str(cache)) == 1
    assert "attnspan tune" in caplog.text
    assert re.search(message, caplog.text), caplog.text


class Refuses(Core):
    """The table is the compiled module's, which knows the levels; or the level is illegal."""

    def __init__(self, level: bool = False) -> None:
        self.level = level

    def active_isa(self) -> str:
        if self.level:
            raise ValueError("ATTNSPAN_ISA: expected one of the levels")
        return super().active_isa()

    def set_tuned(self, rows: list[Any]) -> None:
        assert cpu.core is not None
        cpu.core.set_tuned(rows)


def test_a_folder_and_an_illegal_level_are_one_too(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir()
    assert not loaded()
    tuned.load(Refuses(level=True))
    assert [name in caplog.text for name in ("Is a directory", "ATTNSPAN_ISA")] == [True] * 2


@COMPILED
def test_what_the_core_refuses_is_one_too(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_bytes(content(entry(isa="avx1024")))
    tuned.load(Refuses())
    assert "isa: expected one of" in caplog.text
    assert "got 'avx1024'" in caplog.text


@COMPILED
def test_importing_and_calling_work_with_a_damaged_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache_path(device_name(cpu.isa()))
    assert path is not None
    path.write_text("{")
    code = (
        "import numpy as np\n"
        "from attnspan.kernels import cpu\n"
        "x, out, lse = *np.ones((2, 1, 1, 4, 8), 'float32'), np.empty((1, 1, 4), 'float32')\n"
        "bounds = np.tile(np.array([0, 4], 'int32'), (1, 1, 4, 1, 1))\n"
        "cpu.forward(x, x, x, bounds, out, lse, scale=1.0, num_threads=1)\n"
        "assert (out == 1).all()"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    path_of_modules = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])
    for value, lines in {str(path.parent): 1, "off": 0}.items():
        environment = os.environ | {"ATTNSPAN_TUNE_CACHE": value, "PYTHONPATH": path_of_modules}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stderr.splitlines()) == lines, done.stderr


def test_without_a_file_nothing_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from attnspan.kernels import tuned\n"
        "class Core:\n"
        "    def active_isa(self): return 'portable'\n"
        "    def set_tuned(self, rows): assert not rows\n"
        "before = set(sys.modules)\n"
        "tuned.load(Core())\n"
        "print(sorted(set(sys.modules) - before))"
    )
    given = {"ATTNSPAN_TUNE_CACHE": str(tmp_path), "PYTHONPATH": SOURCE}
    assert run_program("-c", code, **given).strip() == "[]"


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, device = "tuned-some-cpu-r-2-threads-avx2.json", "Some CPU (R), 2 threads, avx2"
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable, base, folder in [
        ("", str(tmp_path / "xdg"), tmp_path / "xdg" / "attnspan"),
        ("", "", tmp_path / ".cache" / "attnspan"),
        ("", "relative", tmp_path / ".cache" / "attnspan"),
        (str(tmp_path / "new"), "", tmp_path / "new"),
        ("~/mine", "", tmp_path / "mine"),
        ("off", "", None),
        ("OFF", "", None),
    ]:
        monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", variable)
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_path(device) == (folder and folder / name)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home folder
    monkeypatch.setenv("ATTNSPAN_TUNE_CACHE", "")
    assert cache_path(device) is None


def test_devices_differ_by_what_tuning_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    name = device_name("avx2")
    assert name.endswith(" threads, avx2")
    assert name != device_name("avx512")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(77))
    assert ", 77 threads" in device_name("avx2")


@pytest.fixture
def real_table() -> Any:
    """The compiled module, whose table is empty before and after."""
    assert cpu.core is not None
    cpu.core.set_tuned([])
    yield cpu.core
    cpu.core.set_tuned([])


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
    Case(q_len=130, k_len=1100, runs=3, heads=2, kv_heads=1),
    Case(q_len=400, k_len=400, mask="documents of 50", head_dim=128, v_dim=96, heads=1, kv_heads=1),
    Case(q_len=3, k_len=700, heads=8),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_configuration_changes_nothing_but_rounding(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    problem = make(case)
    for configs in random_configs(case, 6):
        check_run(case, run(problem, *configs))


def random_configs(case: Case, count: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Pairs of a configuration of forward and one of backward, other ones for each case and dtype."""
    heads, dtype = case.heads, str(case.dtype).removeprefix("torch.")
    sizes = (case.q_len, case.k_len, case.head_dim, case.v_dim, case.runs)
    problem = Problem(case.batch, heads, case.kv_heads, *sizes, dtype, "cpu")
    choice = random.Random(str(case))
    spaces = [cpu.configs(problem, direction) for direction in ("forward", "backward")]
    assert all(len(space) > 2 for space in spaces)
    return [(choice.choice(spaces[0]), choice.choice(spaces[1])) for _ in range(count)]


@COMPILED
def test_calls_look_up_what_was_tuned(real_table: Any) -> None:
    # In bfloat16, gradients of blocks of 96 are summed in another order, which shows in the last bits.
    problem = make(Case(q_len=1000, k_len=1000, mask="full", dtype=torch.bfloat16))
    plain = run(problem)
    place = (cpu.isa(), "bfloat16", 64, length_bucket(1000), "dense")
    forward = {"block_q": cpu.core.blocks("forward", "bfloat16")[0], "block_k": 512, "threads": 0}
    backward = {"block_q": 96, "block_k": 96, "threads": 0}
    table = [("forward", *place, *forward.values()), ("backward", *place, *backward.values())]
    real_table.set_tuned(table)
    looked_up, explicit = run(problem), run(problem, forward, backward)
    own_choice = run(problem, {"threads": 2}, {"threads": 2})
    assert torch.equal(looked_up["out"], plain["out"]), "forward, no configuration changes a bit"
    for name in ("dq", "dk", "dv"):
        assert torch.equal(looked_up[name], explicit[name]), name
        assert torch.equal(own_choice[name], plain[name]), "an explicit configuration overrides the table"
    # Tiles go on with the sums that they load, and floats have sums that are cut at 96: no block shows there.
    if cpu.isa() == "avx512bf16":
        assert any(not torch.equal(looked_up[name], plain[name]) for name in ("dq", "dk", "dv"))
