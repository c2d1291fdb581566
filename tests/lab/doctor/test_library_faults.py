"""Ten architectures of transformers: the first finding is the cause, and its remedy mends it."""

from __future__ import annotations

from pathlib import Path

import library_faults
import pytest

from attnspan_lab.doctor import diagnose

pytest.importorskip("transformers")
FILE = Path(library_faults.__file__)


@pytest.mark.long
@pytest.mark.parametrize("name", library_faults.FAULTS)
def test_the_first_finding_is_the_cause_and_its_remedy_mends_it(name: str) -> None:
    fault = library_faults.FAULTS[name]
    found = diagnose(f"{FILE}:{name.replace('-', '__')}", stages=(*fault.stages, "cure"), limit=200)
    first = found.findings[0]
    assert first.kind == fault.kind
    assert "/site-packages/transformers/" in first.places[0].file
    # A crash that writes over the stack may leave its outer lines alone: the evidence has the inner one.
    texts = [x.text for x in first.places]
    assert any(fault.line in x for x in ((*texts, *first.evidence) if fault.kind == "crash" else texts[:1]))
    assert 'attn_implementation="attnspan"' in first.remedy or fault.kind == "graph-break"
    assert first.tried.endswith("gone with attnspan's attention")
