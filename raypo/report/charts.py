"""Charts of metrics by run. A chart is None if no row has its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raypo.metrics.catalogue import Row
from raypo.report.page import COLOURS, Chart

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RowsByRun = Mapping[str, Sequence[Row]]

_GREY = "#8a94a6"


def line_chart(
    title: str,
    rows_by_run: RowsByRun,
    metrics: str | Mapping[str, str],
    *,
    y_title: str = "",
    reference: Mapping[str, float] | None = None,
    reference_name: str = "at the start",
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """Return a chart of metrics by step, coloured by run, or by metric if there is a single run.

    Args:
        title: Title of the chart.
        rows_by_run: Metrics by step for each run.
        metrics: Name of a metric, or legend labels of several metrics by name.
        y_title: Unit of the vertical axis.
        reference: Values to draw as dashed horizontal lines, by run.
        reference_name: Legend label of the dashed line.
        note: A sentence under the title.
        wide: True for the whole width of the page.
    """
    names = {metrics: ""} if isinstance(metrics, str) else metrics
    has_several_runs = len(rows_by_run) > 1
    figure = new_figure("step", y_title)
    steps: list[float] = []
    for run_number, (run, rows) in enumerate(rows_by_run.items()):
        for name_number, (name, label) in enumerate(names.items()):
            seen = _rows_with(rows, "step", name)
            if not seen:
                continue
            steps += [row["step"] for row in seen]
            sparse = len(seen) < 0.7 * len(rows) or len(seen) < 3
            figure.add_scatter(
                x=[row["step"] for row in seen],
                y=[row[name] for row in seen],
                name=", ".join(filter(None, [run if has_several_runs else "", label])) or title,
                mode="lines+markers" if sparse else "lines",
                line_color=_colour(run_number if has_several_runs else name_number),
                line_dash="dot" if has_several_runs and name_number else "solid",
                line_width=2,
                marker_size=8,
            )
    if not steps:
        return None
    drawn = [
        row[name]
        for rows in rows_by_run.values()
        for name in names
        for row in _rows_with(rows, name)
    ]
    if len(drawn) > 1 and min(drawn) == max(drawn):  # plotly would draw from -1 to 1 around it
        margin = 0.1 * abs(drawn[0]) or 0.1
        figure.update_yaxes(range=[drawn[0] - margin, drawn[0] + margin])
    for number, (run, value) in enumerate((reference or {}).items()):
        if math.isfinite(value):
            figure.add_scatter(
                x=[min(steps), max(steps)],
                y=[value, value],
                name=f"{run} {reference_name}" if has_several_runs else reference_name,
                mode="lines",
                line_color=_colour(number) if has_several_runs else _GREY,
                line_dash="dash",
                line_width=1.5,
            )
    return chart_of(title, figure, note, wide)


def scatter_chart(
    title: str, rows_by_run: RowsByRun, x: str, y: str, *, x_title: str = "", y_title: str = ""
) -> Chart | None:
    """Return a chart of one metric against another, with a point per step, connected in order."""
    figure = new_figure(x_title or x, y_title or y)
    for number, (run, rows) in enumerate(rows_by_run.items()):
        seen = _rows_with(rows, x, y)
        if not seen:
            continue
        steps = [row.get("step") for row in seen]
        figure.add_scatter(
            x=[row[x] for row in seen],
            y=[row[y] for row in seen],
            text=[f"step {step}" for step in steps],
            name=run,
            mode="lines+markers",
            line_color=_colour(number),
            line_width=1,
            marker_size=8,
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        )
        if len(rows_by_run) == 1 and all(map(_is_number, steps)) and len(seen) > 1:
            figure.update_traces(
                marker_color=steps, marker_colorscale="Viridis", marker_colorbar=_bar("step")
            )
    return chart_of(title, figure)


def stacked_chart(
    title: str,
    rows: Sequence[Row],
    metrics: Mapping[str, str],
    *,
    y_title: str,
) -> Chart | None:
    """Return stacked bars, one per step; `metrics` maps names to legend labels."""
    look = {"barmode": "stack", "bargap": 0.1, "showlegend": True, "legend_traceorder": "normal"}
    figure = new_figure("step", y_title, **look)
    for number, (name, label) in enumerate(metrics.items()):
        if any(_is_number(row.get(name)) for row in rows):
            figure.add_bar(
                x=[row["step"] for row in rows],
                y=[row.get(name) for row in rows],
                name=label,
                marker_color=_colour(number),
            )
    return chart_of(title, figure, wide=True)


def bar_chart(
    title: str,
    values_by_run: Mapping[str, Mapping[str, float]],
    *,
    x_title: str,
) -> Chart | None:
    """Return horizontal bars, one per label and run, with the first label on top."""
    several = len(values_by_run) > 1
    figure = new_figure(x_title, barmode="group", showlegend=several, yaxis_autorange="reversed")
    for number, (run, values) in enumerate(values_by_run.items()):
        if values:
            figure.add_bar(
                orientation="h",
                y=list(values),
                x=list(values.values()),
                name=run,
                marker_color=_colour(number),
                text=[f"{value:.3g}" for value in values.values()],
                textposition="auto",
                textangle=0,
                hovertemplate="%{y}: %{x:.4g}<extra></extra>",
            )
    return chart_of(title, figure)


def spans_decades(values: Sequence[Any]) -> bool:
    """Return True if values need a logarithmic axis: all are positive and span two decades."""
    if not values or not all(_is_number(value) and value > 0 for value in values):
        return False
    return max(values) >= 100 * min(values)


def new_figure(x_title: str = "", y_title: str = "", **layout: Any) -> Figure:
    """Return a figure without traces."""
    # Plotly takes half a second to import, and only reports need it.
    from plotly.graph_objects import Figure

    figure = Figure(layout_template={})  # the page has its own style
    return figure.update_layout(xaxis_title_text=x_title, yaxis_title_text=y_title, **layout)


def chart_of(title: str, figure: Figure, note: str = "", wide: bool = False) -> Chart | None:
    """Return the figure as a block of a page, or None if the figure has no traces."""
    if not figure.data:
        return None
    return Chart(title, figure.to_plotly_json(), note=note, wide=wide)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _bar(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "thickness": 10, "outlinewidth": 0}


def _rows_with(rows: Sequence[Row], *names: str) -> list[Row]:
    return [row for row in rows if all(_is_number(row.get(name)) for name in names)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
