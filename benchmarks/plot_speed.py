"""Bar chart of benchmarks/results/speed_cuda.json for the documentation: docs/images/speed.svg.

python -m benchmarks.plot_speed
"""

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, TARGET = HERE / "results" / "speed_cuda.json", HERE.parent / "docs" / "images" / "speed.svg"
COLORS = {"stock eager": "#b8bec9", "stock compiled": "#7d8797", "anyaccel": "#1f6feb", "anyaccel fast": "#79b8ff"}
LEFT, BAR, GAP, WIDTH, BAR_WIDTH = 270, 15, 26, 900, 500


def draw(report: dict[str, Any]) -> str:
    """Return an SVG with bars for each case, relative to its slowest variant, and the floor as a red line."""
    lines: list[str] = []
    top = 52
    for row in report["rows"]:
        variants = {name: variant for name, variant in row["variants"].items() if "median_s" in variant}
        if len(variants) == 1:
            continue  # nothing to compare it with
        slowest = max(variant["median_s"] for variant in variants.values())
        case_top, floor = top, LEFT + BAR_WIDTH * row["floor_s"] / slowest
        for name, variant in variants.items():
            length = BAR_WIDTH * variant["median_s"] / slowest
            against = row.get("against stock compiled")
            ratio = f", {against:.2f} times as fast" if against and name == "anyaccel" else ""
            lines.append(f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[name]}"/>')
            text = f"{variant['median_s']:.3f} s{ratio}"
            end = LEFT + length
            start = floor if end < floor < end + 6 * len(text) else end  # keep the text clear of the floor line
            lines.append(f'<text x="{start + 6:.1f}" y="{top + 11}" class="small">{text}</text>')
            top += BAR
        middle = (case_top + top) / 2 + 3
        lines.append(f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(row["title"])}</text>')
        ends = f'x1="{floor:.1f}" x2="{floor:.1f}" y1="{case_top - 4}" y2="{top + 2}"'
        lines.append(f'<line {ends} stroke="#d1242f" stroke-width="2"/>')
        top += GAP
    legend = "".join(
        f'<rect x="{LEFT + 140 * index}" y="14" width="12" height="12" fill="{color}"/>'
        f'<text x="{LEFT + 140 * index + 18}" y="24">{name}</text>'
        for index, (name, color) in enumerate(COLORS.items())
    )
    head = f"{escape(report['device'])}, bfloat16, one image; speedup over stock compiled; red: floor"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 8}"'
        ' font-family="sans-serif" font-size="13">'
        "<style>.small{font-size:11px}text{fill:#24292f}</style>"
        f'<rect width="{WIDTH}" height="{top + 8}" fill="#ffffff"/>'
        f'{legend}<text x="{LEFT}" y="42" class="small">{head}</text>{"".join(lines)}</svg>\n'
    )


def main() -> None:
    """Write the chart."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw(json.loads(SOURCE.read_text())))
    print(TARGET.name)


if __name__ == "__main__":
    main()
