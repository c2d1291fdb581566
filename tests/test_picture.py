"""Pictures, read back, are the masks they show."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from samples.masks import BATCH, IDS, KEYS, SAMPLES

import attnspan as a
from attnspan.masks.picture import svg, text

_UPPER, _LOWER = {" ": 0, "▀": 1, "▄": 0, "█": 1}, {" ": 0, "▀": 0, "▄": 1, "█": 1}
_SHADES = {" ": (0, 0), "░": (0, 1 / 3), "▒": (1 / 3, 2 / 3), "▓": (2 / 3, 1), "█": (1, 1)}
_SVG = "{http://www.w3.org/2000/svg}"


def _cells(picture):
    return [line[line.index("│") + 1 : -1] for line in picture.splitlines() if line.endswith("│")]


def _read_text(picture, q_len):
    rows = [[part[c] for c in line] for line in _cells(picture) for part in (_UPPER, _LOWER)]
    return np.array(rows[:q_len], bool)


def _read_svg(picture, q_len, k_len):
    image = np.zeros((q_len, k_len), int)
    for path in ElementTree.fromstring(picture).iter(f"{_SVG}path"):
        for x, y, wide, tall in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\3z", path.get("d")):
            image[int(y) : int(y) + int(tall), int(x) : int(x) + int(wide)] += 1
    assert image.max(initial=0) <= 1
    return image.astype(bool)


@pytest.mark.parametrize("q_len", [KEYS, 7])
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_picture_is_the_dense_form(sample, q_len):
    spans = sample.mask().spans(q_len, KEYS, batch=BATCH)
    want = sample.dense(sample.default_q_index(q_len), np.arange(KEYS))[:, 0]
    for b in range(BATCH):
        np.testing.assert_array_equal(_read_text(text(spans, at=(b, 0)), q_len), want[b])
        np.testing.assert_array_equal(_read_svg(svg(spans, at=(b, 0)), q_len, KEYS), want[b])


def test_a_large_picture_shades_by_coverage():
    spans = (a.causal() & a.segments(np.repeat(np.arange(4), [40, 8, 100, 52]))).spans(200, 200)
    dense = np.asarray(spans.dense())[0, 0].reshape(25, 8, 50, 4).mean((1, 3))
    cells = np.array([list(line) for line in _cells(text(spans, width=50, height=100))])
    low, high = (np.array([[_SHADES[x][i] for x in line] for line in cells]) for i in (0, 1))
    assert ((low <= dense) & (dense <= high)).all()
    assert (((dense == 0) == (cells == " ")) & ((dense == 1) == (cells == "█"))).all()
    # An SVG stays small.
    spans = (a.causal() & a.window(3000)).spans(1 << 14, 1 << 14)
    picture = svg(spans)
    assert len(picture) < 40_000
    shades = [float(x.get("fill-opacity")) for x in ElementTree.fromstring(picture).iter(f"{_SVG}path")]
    assert shades == sorted(set(shades))
    assert shades[-1] == 1
    image = _read_svg(picture, 256, 256)
    np.testing.assert_array_equal(image, np.asarray(spans.block_states(64, 64))[0, 0] > 0)


def test_show_prints_the_expression_the_caption_and_axis_numbers(capsys):
    (a.causal() & a.window(1)).show(5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["causal() & window(1)", "  key 0", "query┌─────┐"]
    assert lines[-1] == "5 queries x 5 keys, R = 1, 36.0 % visible"
    a.segments(torch.arange(300).reshape(2, 150) // 100).show(150, batch=2, at=(1, 0))
    caption = "150 queries x 150 keys, R = 1, 55.6 % visible, a character is 6 x 3\n"
    assert capsys.readouterr().out.endswith(caption)
    lines = text(a.causal().spans(20, 20)).splitlines()
    assert lines[0] == "  key 0       8       16"
    assert [line[:5].strip() for line in lines[2:-2]] == ["0", "", "", "", "8", "", "", "", "16", ""]


def test_notebooks_draw_masks_at_the_size_of_their_arrays():
    for mask, shown in (
        (a.causal() & a.segments(np.arange(30) // 7), "30 queries x 30 keys"),
        (a.causal() & a.segments(np.arange(30) // 7), "causal() &amp; segments(int64[30])"),
        (a.causal(), "64 queries x 64 keys"),
        (a.segments([1, 2], [1, 1, 1, 2, 2]), "2 queries x 5 keys"),
        (a.causal().prepare(3, 4), "3 queries x 4 keys"),
        (a.documents([[0, 5]]), "5 queries x 5 keys"),
    ):
        assert shown in mask._repr_svg_()
    # The batch size is not the mask's to know: the notebook shows the expression instead.
    assert a.cache([1, 2, 3])._repr_svg_() is None


def test_pictures_refuse_what_they_cannot_show():
    with pytest.raises(ValueError, match="picture: expected width and height of at least 1, got 0, 3"):
        text(a.causal().spans(4, 4), width=0, height=3)
    two_rows = a.segments([[0, 0], [0, 1]]).spans(2, 2, batch=2)
    assert text(two_rows, at=(1, 5)) == text(two_rows, at=(1, 0))  # all heads are alike
    broken = a.segments([1, 0, 1]).spans(3, 3)
    for draw in (text, svg):
        for at in ((2, 0), (-1, 0), (0, -1)):
            with pytest.raises(ValueError, match=r"at: expected a batch element and a head of \(2, 1\)"):
                draw(two_rows, at=at)
        with pytest.raises(ValueError, match="query 0: expected ascending, disjoint spans"):
            draw(broken)


def test_a_picture_has_a_card_of_its_own_under_all_that_it_shows():
    """In an <img>, text does not take its colour from the page: on a dark one it was black on black."""
    root = ElementTree.fromstring(svg((a.causal() & a.window(2)).spans(12, 12), title="causal() & window(2)"))
    card, *rest = list(root)
    assert card.tag == f"{_SVG}rect"
    assert all(card.get(side) == root.get(side) for side in ("width", "height"))
    texts = [x.get("fill") for x in rest if x.tag == f"{_SVG}g" and x.get("font-size")]
    light, *dark = ([int(x[i : i + 2], 16) for i in (1, 3, 5)] for x in (card.get("fill"), *texts))
    assert min(light) >= 0xEE
    assert max(map(max, dark)) <= 0x66, "a contrast of 7 to 1"
