"""Line chart of benchmarks/results/serve_load_cpu.json for the documentation: docs/images/serve-load.svg.

python -m benchmarks.plot_serve_load
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, TARGET = HERE / "results" / "serve_load_cpu.json", HERE.parent / "docs" / "images" / "serve-load.svg"
LINES = {"worker": "#1f6feb", "service": "#2da44e"}
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 700, 220
STEP_MIB = 200


def draw(report: dict[str, Any]) -> str:
    """Return an SVG with the memory of the service and of its worker over time."""
    series = report["series"]
    highest = max(row["worker"] for row in series)
    top_mib = STEP_MIB * (int(highest / STEP_MIB) + 1)
    parts = []
    for mib in range(0, top_mib + 1, STEP_MIB):
        y = TOP + HEIGHT * (1 - mib / top_mib)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mib}</text>')
    for minute in range(0, int(report["seconds"] // 60) + 1, 10):
        x = LEFT + WIDTH * minute * 60 / report["seconds"]
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{minute}</text>')
    for name, color in LINES.items():
        points = " ".join(
            f"{LEFT + WIDTH * row['seconds'] / report['seconds']:.1f},{TOP + HEIGHT * (1 - row[name] / top_mib):.1f}"
            for row in series
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = TOP + HEIGHT * (1 - series[-1][name] / top_mib) - 8
        growth = f"{report[name]['growth']:+.1%} between the second and the last quarter"
        parts.append(f'<text x="{LEFT + WIDTH}" y="{y:.1f}" text-anchor="end" fill="{color}">{name}: {growth}</text>')
    title = f"Resident memory in MiB over {report['seconds'] / 60:.0f} minutes, {report['requests']} requests"
    height = TOP + HEIGHT + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="#ffffff"/>'
        f'<text x="{LEFT}" y="22" font-size="13">{title}</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Write the chart."""
    TARGET.write_text(draw(json.loads(SOURCE.read_text())))
    print(TARGET.name)


if __name__ == "__main__":
    main()
