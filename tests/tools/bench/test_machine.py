"""Ceilings, energy and environment: measured where they can be, and said where they cannot."""

import pytest
from attnspan.tools.bench.energy import PackageCounter, energy_counter
from fake_devices import FakeProbe

from attnspan.tools.bench import energy, environment
from attnspan.tools.bench.ceilings import measure_ceilings, native_probe
from attnspan.tools.bench.environment import describe_environment, same_machine


def test_a_probe_is_asked_for_every_kind_with_the_threads_of_the_run():
    probe = FakeProbe()
    ceilings = measure_ceilings("cpu", probe=probe, threads=2, seconds=0.5)
    assert [entry[0] for entry in probe.asked[:3]] == ["amx_bf16", "fma_f32", "dot_bf16"]
    assert {entry[1] for entry in probe.asked} == {2}
    assert probe.asked[3][0] >= 1 << 28, "a buffer beyond any cache"
    assert ceilings.kinds("bfloat16") == ("dot_bf16", "amx_bf16")
    assert set(ceilings.notes) == {*ceilings.flops, "read_bandwidth"}


def test_a_neighbour_that_takes_the_machine_for_a_while_lowers_no_ceiling():
    class Shared(FakeProbe):
        def peak(self, kind, *, num_threads, seconds):
            found = super().peak(kind, num_threads=num_threads, seconds=seconds)
            return found / 2 if len(self.asked) < 10 else found

        def read_bandwidth(self, size, *, num_threads, seconds):
            found = super().read_bandwidth(size, num_threads=num_threads, seconds=seconds)
            return found / 2 if len(self.asked) < 10 else found

    shared, alone = (measure_ceilings("cpu", probe=probe) for probe in (Shared(), FakeProbe()))
    assert shared == alone


def test_without_a_probe_products_of_matrices_stand_in_by_name():
    ceilings = measure_ceilings("cpu", seconds=0.01)
    assert set(ceilings.flops) == {"matmul_f32", "matmul_bf16", "matmul_f16"}
    assert all("lower bound" in ceilings.notes[kind] for kind in ceilings.flops)


def test_the_compiled_module_measures_what_no_product_exceeds_by_far():
    probe = native_probe()
    if probe is None:
        pytest.skip("the compiled module is not built; pip install .")
    ceilings = measure_ceilings("cpu", probe=probe, threads=1, seconds=0.05)
    assert 1e9 < ceilings.flops["fma_f32"] < 1e13
    assert 1e8 < ceilings.read_bandwidth < 1e12


def _zone(folder, name, joules, top=10.0):
    zone = folder / name
    zone.mkdir()
    (zone / "energy_uj").write_text(str(int(joules * 1e6)))
    (zone / "max_energy_range_uj").write_text(str(int(top * 1e6)))
    return zone


def test_packages_are_summed_through_their_overflows(tmp_path):
    first, second = _zone(tmp_path, "a", 9.0), _zone(tmp_path, "b", 1.0)
    counter = PackageCounter((first, second))
    (first / "energy_uj").write_text("2000000")
    (second / "energy_uj").write_text("1500000")
    assert counter() == 3.5
    assert counter() == 3.5


def test_parts_of_a_package_are_not_counted_twice(tmp_path, monkeypatch):
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "dtpm"):
        _zone(tmp_path, name, 1.0)
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    counter, source = energy_counter("cpu")
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1250000")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("1250000")
    assert counter() == 0.25
    assert source.startswith("RAPL, 2 packages")


def test_a_machine_that_hides_its_counters_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_POWERCAP", tmp_path)
    counter, source = energy_counter("cpu")
    assert counter() is None
    assert source == f"not readable: {tmp_path} has no package"
    (tmp_path / "intel-rapl:0").mkdir()
    counter, source = energy_counter("cpu")
    assert counter() is None
    assert source.startswith("not readable: ")


def test_the_environment_tells_what_decides_speed(monkeypatch):
    monkeypatch.setenv("ATTNSPAN_EXAMPLE", "1")
    monkeypatch.setenv("OMP_EXAMPLE", "2")
    monkeypatch.setenv("SECRET_TOKEN", "3")
    found = describe_environment()
    assert found["variables"].items() >= {"ATTNSPAN_EXAMPLE": "1", "OMP_EXAMPLE": "2"}.items()
    assert "SECRET_TOKEN" not in found["variables"]
    assert found["versions"]["torch"]
    for name in ("cpu", "cores", "threads", "isa", "date", "python"):
        assert found[name], name


def test_a_revision_is_of_the_library_itself_or_none(monkeypatch, tmp_path):
    # An installed package lies inside other people's repositories.
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    assert describe_environment()["revision"] is None


def test_machines_are_the_same_where_nothing_that_decides_speed_differs():
    one = {"cpu": "c", "threads": 2, "date": "then", "load_average": [1]}
    assert same_machine(one, one | {"date": "now", "load_average": [2]}) == []
    assert same_machine(one, one | {"threads": 1}) == ["threads: 2, then 1"]
