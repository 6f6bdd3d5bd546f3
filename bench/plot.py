"""One picture of a result: what each system holds and costs the training loop, for one save.

Owns: the picture. Reads rows as `claims.row` makes them; also of a result that lies there:

    python bench/plot.py bench/results/checkpoint-DATE.jsonl
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

BARS = (("blocked", "training thread blocked"), ("lost", "training time lost"))
FLOOR_MS = 0.1  # of an axis that has no zero
OWN, OTHER = "#d1495b", "#5b7c99"


def bars(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Write the picture; one panel for each measure, a bar for each system, its samples as dots."""
    matplotlib.rcParams["svg.hashsalt"] = "stepfast"  # the same rows, the same file
    figure, panels = pyplot.subplots(1, len(BARS), figsize=(11, 3.6), sharey=True)
    for panel, (measure, title) in zip(panels, BARS, strict=True):
        found = {row["system"]: row["samples"] for row in rows if row["measure"] == measure}
        names = list(found)[::-1]
        medians = [max(FLOOR_MS, statistics.median(found[name])) for name in names]
        colours = [OWN if name == "stepfast" else OTHER for name in names]
        panel.barh(names, medians, color=colours, height=0.62)
        for place, (name, median) in enumerate(zip(names, medians, strict=True)):
            samples = [max(FLOOR_MS, sample) for sample in found[name]]
            panel.plot(samples, [place] * len(samples), ".", color="black", markersize=3)
            panel.text(median * 1.15, place + 0.33, f"{median:.3g}", fontsize=7, va="bottom")
        panel.set_xscale("log")
        panel.set_title(f"{title}, for one save", fontsize=10)
        panel.set_xlabel("ms (log)")
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(bars([json.loads(line) for line in source.open()], source.with_suffix(".svg")))
