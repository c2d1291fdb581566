"""`python -m attnspan show FILE`: each format of a file, and files that would run code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnspan as a
from attnspan.__main__ import main
from attnspan.interchange import to_bits, to_flashmask, to_ranges

MASK = a.causal() & a.documents([0, 100, 300])
N = 300


def _formats() -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Name -> arrays of the mask, and options that it needs."""
    q, k, types = to_ranges(MASK, N)
    packed, indptr = to_bits(MASK, [0, 100, 300], [0, 100, 300])
    offsets = np.array([0, 100, 300])
    bits = {"packed": packed, "indptr": indptr, "qo_indptr": offsets, "kv_indptr": offsets}
    return {
        "FlashMask, causal=True": ({"x": to_flashmask(MASK, N)[0]}, []),
        "ranges of MagiAttention": ({"q_ranges": q, "k_ranges": k, "types": types}, []),
        "bits of FlashInfer": (bits, []),
        "offsets of documents, causal=True": ({"cu_seqlens_q": offsets}, ["--causal"]),
        "booleans": ({"x": MASK.prepare(N, N).dense()}, []),
        "spans": ({"x": MASK.prepare(N, N).bounds}, []),
    }


@pytest.mark.parametrize("kind", _formats())
@pytest.mark.parametrize("suffix", ["npy", "npz", "pt", "safetensors"])
def test_each_file_is_drawn_and_its_libraries_are_named(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays, options = _formats()[kind]
    path = tmp_path / f"mask.{suffix}"
    if suffix == "npy":
        if len(arrays) > 1:
            return
        np.save(path, *arrays.values())
    elif suffix == "npz":
        np.savez(path, **arrays)
    elif suffix == "pt":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.tensor(np.array(x)) for name, x in arrays.items()}, path)
    else:
        save = pytest.importorskip("safetensors.numpy").save_file
        save({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path)
    main(["show", str(path), *options])
    said = capsys.readouterr().out
    visible = 100 * 101 // 2 + 200 * 201 // 2
    assert f"300 queries x 300 keys, R = 1, {100 * visible / N**2:.1f} % visible" in said
    facts = dict(line.split(maxsplit=1) for line in said.splitlines()[-7:])
    assert facts["kind"] == kind
    # Rows of blocks 0, 1 and 2 see blocks 0, 0 to 1 and 0 to 2, and row 255 does not see key 99.
    tiles = sum(
        MASK.prepare(N, N).dense()[0, 0][i : i + 128, j : j + 128].any()
        for i in (0, 128, 256)
        for j in (0, 128, 256)
    )
    assert facts["tiles"] == (
        f"{tiles} of 9 blocks of 128 x 128 have a visible pair: "
        f"{tiles * 128**2 / visible:.2f} computed pairs for each visible pair"
    )
    assert facts["flash-attn"] == "yes, 2 documents, by to_varlen"
    assert facts["MagiAttention"] == "yes, 2 ranges, by to_ranges"
    assert facts["FlashMask"].startswith("yes, 1 number")


def test_a_function_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import attnspan as a\n\ndef sinks():\n    return a.causal() & (a.window(3) | a.global_keys(2))\n"
    (tmp_path / "my_masks_54.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    main(["show", "my_masks_54:sinks", "--q-len", "32"])
    said = capsys.readouterr().out
    assert "kind          mask of my_masks_54:sinks" in said
    assert "flash-attn    no: expected documents with one window, the same for all, got query 6" in said
    sys.modules.pop("my_masks_54")


class Dangerous:
    def __reduce__(self) -> Any:
        return print, ("this file ran code",)


@pytest.mark.parametrize("suffix", ["npy", "npz", "pt", "safetensors"])
def test_no_file_runs_code(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"bad.{suffix}"
    if suffix == "npy":
        np.save(path, np.array([Dangerous()], object), allow_pickle=True)
    elif suffix == "npz":
        np.savez(path, x=np.array([Dangerous()], object))
    elif suffix == "pt":
        pytest.importorskip("torch").save({"x": Dangerous()}, path)
    else:
        path.write_bytes(b"no safetensors")
    with pytest.raises(SystemExit):
        main(["show", str(path)])
    said = capsys.readouterr()
    assert "this file ran code" not in said.out
    assert "expected arrays, got other objects, or a broken file" in said.err


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), "expected booleans, bounds of spans"),
        (
            np.zeros((1, 1, 4, 2), int),
            "--causal or --no-causal for FlashMask with two numbers, got neither. Pass --causal",
        ),
        (np.array([1, 2]), "ascending offsets that start at 0"),
    ],
)
def test_other_arrays_are_explained(
    array: np.ndarray, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path / "x.npy")])
    assert message in capsys.readouterr().err
