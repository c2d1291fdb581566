"""The counts of prose.py per 1,000 words stay below limits."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from prose import GROUPS, counts, length, per_thousand, sentences, text_of

ROOT = Path(__file__).parents[2]
MOST = {"semicolons": 3, "that of": 0.3, "nominal what": 0.3, "somebody": 0.3, "by name": 0.5}
#: Groups of pages that tell you what to do.
FOR_YOU = ("README", "how-to", "concepts")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_prose_has_few_habits_that_make_it_hard_to_read(group: str) -> None:
    found = per_thousand(counts(map(text_of, GROUPS[group])))
    assert {habit: found[habit] for habit in MOST if found[habit] > MOST[habit]} == {}
    assert group not in FOR_YOU or found["you"] >= 8


def test_no_page_is_far_from_its_group() -> None:
    for path in GROUPS["docs"]:
        found = per_thousand(counts([text_of(path)]))
        assert found["semicolons"] <= 5, f"{path.relative_to(ROOT)}: semicolons"
        assert found["nominal what"] <= 3, f"{path.relative_to(ROOT)}: sentences that begin with What"


def test_sentences_of_the_readme_are_short() -> None:
    texts = map(text_of, GROUPS["README"])
    assert [x for text in texts for x in sentences(text) if length(x) > 35] == []


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    headless = re.compile(r'"""(What|Who|Whose|Where|Which|How|When)\b')
    files = [*GROUPS["docstrings"], *(ROOT / "examples").rglob("*.py")]
    found = [(path, line) for path in files for line in path.read_text("utf-8").splitlines()]
    assert [(path, line) for path, line in found if headless.search(line)] == []
