"""Training of copying within packed segments on 1, 2 and 4 ranks, also with ids of a wrong layout.

    python benchmarks/convergence.py

Writes benchmarks/results/convergence.json.gz and docs/images/convergence.svg, in one or two minutes on two
cores. The model and its data are in examples/failures/task.py. The code of the ranks is in tests/parallel.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "parallel"), str(ROOT / "examples")]

from copying import Run, train  # noqa: E402
from worlds import world  # noqa: E402

from attnspan_lab.files import write_json  # noqa: E402

#: Name of a curve -> ranks, run, colour, and dashes to distinguish coinciding curves.
CURVES: dict[str, tuple[int, Run, str, str]] = {
    "1 rank": (1, Run(), "#4263eb", ""),
    "2 ranks, exchange": (2, Run("exchange"), "#f08c00", "9 9"),
    "4 ranks, hybrid(2, 2)": (4, Run("hybrid(2, 2)"), "#2f9e44", "3 6"),
    "2 ranks, misplaced ids": (2, Run("exchange", misplaced=True), "#e03131", ""),
    "4 ranks, misplaced ids": (4, Run("exchange", misplaced=True), "#ae3ec9", ""),
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 56, 20, 16, 40
HIGH, LOW = 4.0, 2e-4

INK = "#1f2328"


def draw(curves: dict[str, list[float]]) -> str:
    """Draw the losses over the steps on a logarithmic axis, as an SVG for light and dark pages."""
    steps = max(map(len, curves.values()))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss: float) -> float:
        share = math.log(HIGH / min(max(loss, LOW), HIGH)) / math.log(HIGH / LOW)
        return TOP + (HEIGHT - TOP - BOTTOM) * share

    parts = [
        f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.15"/>'
        f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>'
        for loss in (1.0, 0.1, 0.01, 0.001)
    ]
    parts += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        for step in range(0, steps + 1, 40)
    ]
    parts.append(f'<text x="{x(steps / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for i, (name, losses) in enumerate(curves.items()):
        _, _, colour, dashes = CURVES[name]
        line = " ".join(f"{x(at + 1):.1f},{y(loss):.1f}" for at, loss in enumerate(losses))
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes or "none"}"'
        top = y(0.22) + 17 * i
        parts.append(f'<polyline points="{line}" {style}/>')
        parts.append(f'<path d="M{x(60):.1f} {top:.1f}h34" {style}/>')
        parts.append(f'<text x="{x(60) + 42:.1f}" y="{top + 4:.1f}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}"><title>loss of copying within packed segments</title>'
        '<rect width="100%" height="100%" rx="6" fill="#ffffff"/>'
        f'<g fill="{INK}" font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</g>'
        "</svg>\n"
    )


def main() -> None:
    curves = {}
    for name, (ranks, run, _, _) in CURVES.items():
        curves[name] = world(ranks).run(train, run)[0]
        print(f"{name:24} first {curves[name][0]:.4f}  last ten {sum(curves[name][-10:]) / 10:.6f}")
    apart = max(
        abs(loss / alone - 1)
        for name in ("2 ranks, exchange", "4 ranks, hybrid(2, 2)")
        for loss, alone in zip(curves[name], curves["1 rank"], strict=True)
    )
    print(f"the curves of several ranks differ from one process by at most {apart:.2g} of the loss")
    write_json(ROOT / "benchmarks" / "results" / "convergence.json.gz", curves)
    (ROOT / "docs" / "images" / "convergence.svg").write_text(draw(curves))


if __name__ == "__main__":
    main()
