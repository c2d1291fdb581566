"""The workloads that were promised are there, and count what they say."""

from dataclasses import replace

import numpy as np
import pytest

from attnspan.errors import OptionError
from attnspan_lab.bench import workloads
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.workloads import builtin, corpus_offsets, grid, load_workloads, mask_of, select
from attnspan_lab.files import write_json

TINY = Workload("tiny", "own", 2, 4, 2, 6, 10, 8, 4, "bfloat16", "causal & window(3)")


def test_the_promised_workloads_are_there_once_in_every_dtype():
    labels = [work.label for work in (*builtin(), *grid())]
    assert len(labels) == len(set(labels))
    by_name = {work.name: work for work in builtin()}
    wanted = {f"{name} {dtype}" for name in by_name for dtype in workloads.DTYPES}
    assert {work.label for work in builtin()} == wanted
    families = {work.family for work in builtin()}
    assert families >= {"dense", "causal", "window", "documents", "prefix", "gqa", "decode", "small", "long"}
    assert max(work.k_len for work in by_name.values() if work.family == "long") == 65536
    assert {work.q_len for work in by_name.values() if work.family == "decode"} == {1, 4, 16}
    report = by_name["report-shape"]
    assert (report.batch, report.q_heads, report.q_len, report.head_dim) == (1, 5, 16384, 128)
    for count in (8, 32):
        assert len(mask_of(by_name[f"documents-{count}"]).operands[1].cu_seqlens_q) == count + 1
    cells = {(w.mask, w.dtype, w.head_dim, w.k_len) for w in grid()}
    assert len(cells) == len(grid()) == 2 * 3 * 4 * 7
    assert all(w.q_heads == 8 for w in grid() if w.k_len <= 8192)


def test_corpus_lengths_are_heavy_tailed_and_always_the_same():
    lengths = np.diff(corpus_offsets(1 << 18, seed=0))
    assert (np.diff(corpus_offsets(1 << 18, seed=0)) == lengths).all()
    assert (lengths > 0).all()
    assert lengths.mean() > 2 * np.median(lengths)
    # A row that ends with a document has no empty one behind it.
    assert (np.diff(corpus_offsets(int(lengths[:4].sum()), seed=0)) == lengths[:4]).all()


def test_pairs_flops_and_bytes_are_counted():
    dense = np.asarray(mask_of(TINY).spans(6, 10, batch=2, heads=4).dense())
    assert workloads.visible_pairs(TINY) == np.broadcast_to(dense, (2, 4, 6, 10)).sum()
    q, k, v, out = 2 * 4 * 6 * 8, 2 * 2 * 10 * 8, 2 * 2 * 10 * 4, 2 * 4 * 6 * 4
    for mode, flops, bytes_ in (("forward", 1, 1), ("forward+backward", 3.5, 3)):
        assert workloads.total_flops(TINY, mode, 100) == flops * 2 * 100 * (8 + 4)
        assert workloads.minimal_bytes(TINY, mode) == bytes_ * 2 * (q + k + v + out)


def test_selection_by_name_family_pattern_and_size():
    everything = (*builtin(), *grid())
    assert {w.name for w in select(everything, ["report-shape"])} == {"report-shape"}
    assert {w.family for w in select(everything, ["decode", "small-*"])} == {"decode", "small"}
    found = select(everything, ["grid"], dtypes=["float16"], lengths=[512], head_dims=[64])
    assert [w.name for w in found] == ["grid-full-d64-s512", "grid-causal-d64-s512"]
    with pytest.raises(OptionError, match="expected at least one with these names"):
        select(builtin(), ["dense"], lengths=[7])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"causal & window(3)"', '"causl"', "expected the name of a mask, got causl"),
        ('"kv_heads": 2', '"kv_heads": 3', "kv_heads that divide q_heads"),
        ('"bfloat16"', '"float64"', "a dtype of float32"),
        ('"q_len": 6', '"q_len": "six"', r"\[0\].q_len: expected int, got 'six'"),
        ("[", "", "expected a JSON list of workloads"),
        ("causal & window(3)", "keys([True, False])", "describe 10 keys, got 2"),
        ("float32", "bfloat16", "tiny: expected a unique name among workloads of the same dtype"),
    ],
)
def test_ones_own_workloads_are_read_and_checked(tmp_path, old, new, message):
    path, works = tmp_path / "own.json", (TINY, replace(TINY, dtype="float32"))
    write_json(path, works, indent=1)
    assert load_workloads(path) == works
    # The first of two with the same label counts.
    assert select([replace(TINY, k_len=12), *works])[0].k_len == 12
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load_workloads(path)
