"""Ten architectures of transformers: the first finding is the cause, and its remedy mends it."""

from __future__ import annotations

from pathlib import Path

import ailing
import pytest

from attnspan_lab.doctor import diagnose

pytest.importorskip("transformers")
FILE = Path(ailing.__file__)


@pytest.mark.long
@pytest.mark.parametrize("name", ailing.AILMENTS)
def test_the_first_finding_is_the_cause_and_its_remedy_mends_it(name: str) -> None:
    ailment = ailing.AILMENTS[name]
    found = diagnose(f"{FILE}:{name.replace('-', '__')}", stages=(*ailment.stages, "cure"), limit=200)
    first = found.findings[0]
    assert first.kind == ailment.kind
    assert "/site-packages/transformers/" in first.places[0].file
    # A crash that writes over the stack may leave its outer lines alone: the evidence has the inner one.
    texts = [x.text for x in first.places]
    assert any(
        ailment.line in x for x in ((*texts, *first.evidence) if ailment.kind == "crash" else texts[:1])
    )
    assert 'attn_implementation="attnspan"' in first.remedy or ailment.kind == "graph-break"
    assert first.tried.endswith("gone with attnspan's attention")
