"""Pages that people look at: one self-contained HTML file each, with nothing to download.

`run_page(runs)` is the page of one run or of several on the same axes. Another page is put
together from the same blocks:

    page = Page("My sweep", subtitle="12 trials")
    trials = page.section("Trials", note="Ranked by the held-out score.")
    trials.add(Table(["trial", "score"], [["gentle", 0.81], ["bold", 0.64]]))
    trials.add(line_chart("Score", {"gentle": rows, "bold": others}, "eval/score_mean"))
    page.write("sweep.html")

A chart of metrics that no row has is None, and `add` leaves None out.
"""

from raypo.report.charts import (
    bar_chart,
    line_chart,
    parallel_chart,
    scatter_chart,
    spans_decades,
    stacked_chart,
)
from raypo.report.page import (
    Chart,
    Details,
    Explorer,
    Notices,
    Page,
    Samples,
    Section,
    Table,
    Tiles,
    Words,
)
from raypo.report.run_page import load_run, run_page

__all__ = [
    "Chart",
    "Details",
    "Explorer",
    "Notices",
    "Page",
    "Samples",
    "Section",
    "Table",
    "Tiles",
    "Words",
    "bar_chart",
    "line_chart",
    "load_run",
    "parallel_chart",
    "run_page",
    "scatter_chart",
    "spans_decades",
    "stacked_chart",
]
