"""Ceilings, environment, memory: measured where they can be, and said where they cannot."""

from dataclasses import replace

import pytest
import torch
from fake_devices import FakeProbe

from attnspan_lab.bench import environment
from attnspan_lab.bench.ceilings import measure_ceilings, native_probe
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.environment import describe_environment, same_machine
from attnspan_lab.bench.memory import high_water_refusal, peak_here, process_peak
from attnspan_lab.bench.peers import Ready, peers_by_name
from attnspan_lab.bench.timing import MeasurementError

WORK = Workload("w", "own", 1, 1, 1, 4096, 4096, 16, 16, "float32", "window(64)")
MIB = 2**20

on_linux = pytest.mark.skipif(
    high_water_refusal() is not None, reason=f"{high_water_refusal()}; measure on Linux with /proc"
)


class Shared(FakeProbe):
    """A neighbour takes half of the machine for a while."""

    def peak(self, kind, **given):
        found = super().peak(kind, **given)
        return found / 2 if len(self.asked) < 10 else found


def test_ceilings_are_the_best_of_nine_rounds_with_their_spread():
    probe = FakeProbe()
    alone, shared = (measure_ceilings("cpu", probe=x, threads=2, seconds=0.5) for x in (probe, Shared()))
    assert [entry[0] for entry in probe.asked[:3]] == ["amx_bf16", "fma_f32", "dot_bf16"]
    assert ({entry[1] for entry in probe.asked}, len(probe.asked)) == ({2}, 9 * 4)
    assert probe.asked[3][0] >= 1 << 28, "a buffer beyond any cache"
    assert set(alone.notes) == set(alone.spread) == {*alone.flops, "read_bandwidth"}
    assert shared.flops == alone.flops
    assert (shared.spread["fma_f32"], alone.spread["fma_f32"]) == (0.5, 0.0)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_real_ceilings_are_plausible_and_products_of_matrices_stand_in_by_name(native):
    probe = native_probe() if native else None
    ceilings = measure_ceilings("cpu", probe=probe, threads=1, seconds=0.02 if native else 0.05)
    assert 1e8 < ceilings.read_bandwidth < 1e12
    if probe is None:
        assert set(ceilings.flops) == {"matmul_f32", "matmul_bf16", "matmul_f16"}
        assert all("lower bound" in ceilings.notes[kind] for kind in ceilings.flops)
    assert 1e8 < next(x for kind, x in ceilings.flops.items() if kind.endswith("_f32")) < 1e13


def test_the_environment_tells_what_decides_speed(monkeypatch, tmp_path):
    for name in ("ATTNSPAN_EXAMPLE", "OMP_EXAMPLE", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "1")
    found = describe_environment()
    assert found["variables"].items() >= {"ATTNSPAN_EXAMPLE": "1", "OMP_EXAMPLE": "1"}.items()
    assert "SECRET_TOKEN" not in found["variables"]
    assert found["versions"]["torch"]
    assert all(found[name] for name in ("cpu", "cores", "threads", "isa", "date", "python"))
    # An installed package lies inside other people's repositories.
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert describe_environment()["revision"] is None
    assert same_machine(found, found | {"date": "now", "load_average": [2]}) == []
    assert same_machine(found | {"threads": 2}, found | {"threads": 1}) == ["threads: 2, then 1"]


@pytest.mark.slow
@on_linux
def test_what_only_the_first_call_needs_is_not_counted():
    class Compiling:
        name = "compiling"

        def prepare(self, _job):
            sizes = iter([512 * MIB])
            return Ready(lambda: torch.ones(next(sizes, 32 * MIB), dtype=torch.uint8), Device())

    assert 32 * MIB <= peak_here(Compiling(), WORK, "forward") < 256 * MIB


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@on_linux
def test_a_dense_mask_is_seen_and_spans_are_not_and_a_process_that_fails_says_why():
    dense = process_peak("sdpa-dense-mask", WORK, "forward", threads=1)
    ours = peak_here(peers_by_name()["attnspan"], WORK, "forward")
    square = 4096 * 4096
    assert dense > square, "a byte for each pair at least"
    assert 4096 * 16 * 4 <= ours < square / 4, "the output at least, and nothing of the order of all pairs"
    # A peer is warmed up on a problem that it can do.
    packed = replace(WORK, q_len=64, k_len=64, mask="causal & documents([0, 10, 64])")
    assert peak_here(peers_by_name()["sdpa-per-document"], packed, "forward+backward") >= 0
    with pytest.raises(MeasurementError, match="memory of attnspan: expected a process that prints its res"):
        process_peak("attnspan", replace(WORK, dtype="float8"), "forward", threads=1)
