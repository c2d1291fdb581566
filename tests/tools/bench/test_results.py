"""The file: written whole, read whole, and refused by name where it is another."""

import json
from dataclasses import replace

import pytest

from attnspan.errors import OptionError
from attnspan.tools.bench.results import (
    SCHEMA,
    Ceilings,
    Cell,
    MonitorRecord,
    PhaseShares,
    Rate,
    Ratio,
    Results,
    Run,
    Timing,
    TrainingCell,
    Workload,
)

WORK = Workload("w", "dense", 1, 8, 2, 64, 128, 32, 16, "bfloat16", "full", "a note")
OURS = Run("attnspan", execute=Timing((1.0, 2.0), calls=3), utilisation=0.5, error=0.0)
PEER = Run("jax", execute=Timing((4.0,)), pipelined=Timing((2.0,)), ratio=Ratio(2.0, 1.9, 2.1, 7), noisy=True)
REFUSED = Run("flex", reason="it has no backward pass on CPU")
CELL = Cell(WORK, "forward", 10, 3e9, 1e6, (OURS, PEER, REFUSED))
WHOLE = Results(
    environment={"cpu": "c", "versions": {"torch": None}, "load_average": [0.5]},
    ceilings=Ceilings({"fma_f32": 1e9, "dot_bf16": 4e9, "amx_bf16": 2e10}, 1e9, {"fma_f32": "loop"}),
    cells=(CELL,),
    training=(TrainingCell("sdpa", seconds=Timing((0.5,)), tokens_per_second=Rate((9.0,)), peak_memory=5),),
    monitor=(MonitorRecord(1, 0.5, 100, PhaseShares(data=0.25), attention_seconds=0.1),),
    complete=False,
)


def test_what_is_written_is_what_is_read(tmp_path):
    WHOLE.save(tmp_path / "new" / "results.json")
    assert Results.load(tmp_path / "new" / "results.json") == WHOLE


def test_nothing_is_left_beside_the_file(tmp_path):
    WHOLE.save(tmp_path / "results.json")
    replace(WHOLE, cells=()).save(tmp_path / "results.json")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert Results.load(tmp_path / "results.json").cells == ()


def test_a_file_of_another_schema_is_refused_by_name(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": SCHEMA + 1}))
    with pytest.raises(OptionError, match=rf"expected results of schema {SCHEMA}, got schema {SCHEMA + 1}\."):
        Results.load(path)
    path.write_text("{}")
    with pytest.raises(OptionError, match="got a file without a schema"):
        Results.load(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data["cells"][0].pop("pairs"),
            r"cells\[0\]: expected the fields workload",
        ),
        (lambda data: data["cells"][0].update(pairs="many"), r"cells\[0\].pairs: expected int, got 'many'"),
        (lambda data: data["cells"][0].update(extra=1), r"cells\[0\]: expected the fields"),
        (lambda data: data.update(cells={}), r"cells: expected a list, got dict"),
        (lambda data: data["ceilings"]["flops"].update(x=True), r"flops.x: expected float, got True"),
    ],
)
def test_a_damaged_file_says_where(tmp_path, damage, message):
    WHOLE.save(tmp_path / "results.json")
    data = json.loads((tmp_path / "results.json").read_text())
    damage(data)
    (tmp_path / "results.json").write_text(json.dumps(data))
    with pytest.raises(OptionError, match=message):
        Results.load(tmp_path / "results.json")


def test_half_a_file_is_refused(tmp_path):
    WHOLE.save(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    (tmp_path / "results.json").write_text(text[: len(text) // 2])
    with pytest.raises(OptionError, match="expected a results file"):
        Results.load(tmp_path / "results.json")


def test_rates_and_shares_of_a_cell():
    assert CELL.flops_per_second(OURS) == 2e9
    assert CELL.seconds_per_pair(OURS) == 0.15
    assert CELL.shares(OURS, WHOLE.ceilings) == {"dot_bf16": 0.5, "amx_bf16": 0.1}
    assert CELL.bandwidth_share(OURS, WHOLE.ceilings) == pytest.approx(1e6 / 1.5 / 1e9)
    assert CELL.flops_per_second(REFUSED) is None
    assert CELL.shares(REFUSED, WHOLE.ceilings) == {}


def test_a_dtype_without_a_ceiling_of_its_own_is_held_against_float32():
    assert WHOLE.ceilings.kinds("float16") == ("fma_f32",)
    assert WHOLE.ceilings.attainable("bfloat16", 2.0) == 2e9
    assert WHOLE.ceilings.attainable("bfloat16", 1e6) == 2e10


def test_the_basis_decides_which_times_count():
    assert CELL.seconds(PEER) == 4.0
    assert replace(CELL, basis="pipelined").seconds(PEER) == 2.0
    assert replace(CELL, basis="pipelined").seconds(OURS) == 1.5
    assert PEER.waiting == 2.0


def test_numbers_that_json_writes_without_a_point_are_still_numbers(tmp_path):
    data = tmp_path / "results.json"
    data.write_text(
        json.dumps({"schema": SCHEMA, "ceilings": {"flops": {}, "read_bandwidth": 5, "notes": {}}})
    )
    assert Results.load(data).ceilings.read_bandwidth == 5.0
