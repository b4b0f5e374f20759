"""Charts from rows of metrics; a chart of metrics that no row has is None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raypo.metrics.report.page import Chart

Row = Mapping[str, Any]
RowsByRun = Mapping[str, Sequence[Row]]


def line_chart(
    title: str,
    rows_by_run: RowsByRun,
    metrics: str | Mapping[str, str],
    *,
    x: str = "step",
    y_title: str = "",
    reference: Mapping[str, float] | None = None,
    reference_name: str = "at the start",
    log_y: bool = False,
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """Metrics by step; a colour is a run, or a metric where there is one run only.

    Args:
        title: What is drawn.
        rows_by_run: Metrics by step for each run.
        metrics: A metric's name, or names with the words for the legend.
        x: The metric on the horizontal axis.
        y_title: Unit of the vertical axis.
        reference: By run, a value that is drawn as a dashed line over all steps.
        reference_name: What the dashed line is.
        log_y: Whether the vertical axis is logarithmic.
        note: A sentence under the title.
        wide: Over the whole page.
    """
    names = {metrics: ""} if isinstance(metrics, str) else metrics
    several = len(rows_by_run) > 1
    traces: list[dict[str, Any]] = []
    steps: list[float] = []
    for run_number, (run, rows) in enumerate(rows_by_run.items()):
        for name_number, (name, label) in enumerate(names.items()):
            points = _points(rows, x, name)
            if not points:
                continue
            steps += [point[0] for point in points]
            sparse = len(points) < 0.7 * len(rows) or len(points) < 3
            traces.append(
                {
                    "x": [point[0] for point in points],
                    "y": [point[1] for point in points],
                    "name": ", ".join(filter(None, [run if several else "", label])) or title,
                    "mode": "lines+markers" if sparse else "lines",
                    "slot": run_number if several else name_number,
                    "line": {"dash": "dot" if several and name_number else "solid", "width": 2},
                    "marker": {"size": 8},
                }
            )
    if not traces:
        return None
    for number, (run, value) in enumerate((reference or {}).items()):
        if math.isfinite(value):
            label = f"{run} {reference_name}" if several else reference_name
            slot = number if several else "reference"
            traces.append(_dashed(label, value, (min(steps), max(steps)), slot))
    layout: dict[str, Any] = _axes(x, y_title) | {"showlegend": len(traces) > 1}
    if log_y:
        layout["yaxis"]["type"] = "log"
    return Chart(title, {"data": traces, "layout": layout}, note=note, wide=wide)


def _dashed(name: str, value: float, ends: tuple[float, float], slot: int | str) -> dict[str, Any]:
    return {
        "x": list(ends),
        "y": [value, value],
        "name": name,
        "mode": "lines",
        "slot": slot,
        "line": {"dash": "dash", "width": 1.5},
    }


def scatter_chart(
    title: str,
    rows_by_run: RowsByRun,
    x: str,
    y: str,
    *,
    x_title: str = "",
    y_title: str = "",
    label: str = "step",
    joined: bool = True,
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """One metric against another, a point a row; `joined` draws the path from row to row."""
    traces: list[dict[str, Any]] = []
    for number, (run, rows) in enumerate(rows_by_run.items()):
        seen = [row for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]
        if not seen:
            continue
        labels = [row.get(label) for row in seen]
        by_label = len(rows_by_run) == 1 and all(map(_is_number, labels)) and len(seen) > 1
        traces.append(
            {
                "x": [row[x] for row in seen],
                "y": [row[y] for row in seen],
                "text": [f"{label} {value}" for value in labels],
                "name": run,
                "mode": "lines+markers" if joined else "markers",
                "slot": number,
                "line": {"width": 1},
                "marker": {
                    "size": 8,
                    **(
                        {"color": labels, "colorscale": "Viridis", "colorbar": _bar(label)}
                        if by_label
                        else {}
                    ),
                },
                "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
            }
        )
    if not traces:
        return None
    layout = _axes(x_title or x, y_title or y) | {"showlegend": len(traces) > 1}
    return Chart(title, {"data": traces, "layout": layout}, note=note, wide=wide)


def stacked_chart(
    title: str,
    rows: Sequence[Row],
    metrics: Mapping[str, str],
    *,
    x: str = "step",
    y_title: str = "",
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """Parts that add up, one bar a row; `metrics` are names with the words for the legend."""
    traces = [
        {
            "type": "bar",
            "x": [row[x] for row in rows],
            "y": [row.get(name) for row in rows],
            "name": label,
            "slot": slot,
        }
        for slot, (name, label) in enumerate(metrics.items())
        if any(_is_number(row.get(name)) for row in rows)
    ]
    if not traces:
        return None
    layout = _axes(x, y_title) | {"barmode": "stack", "bargap": 0.1, "showlegend": True}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    return Chart(title, {"data": traces, "layout": layout}, note=note, wide=wide)


def bar_chart(
    title: str,
    values_by_run: Mapping[str, Mapping[str, float]],
    *,
    x_title: str = "",
    note: str = "",
    wide: bool = False,
) -> Chart | None:
    """Lying bars, one a label and run, the first label on top."""
    several = len(values_by_run) > 1
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(values),
            "x": list(values.values()),
            "name": run,
            "slot": slot,
            "text": [f"{value:.3g}" for value in values.values()],
            "textposition": "auto",
            "textangle": 0,
            "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
        }
        for slot, (run, values) in enumerate(values_by_run.items())
        if values
    ]
    if not traces:
        return None
    layout = _axes(x_title, "") | {"showlegend": several, "barmode": "group"}
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Chart(title, {"data": traces, "layout": layout}, note=note, wide=wide)


def parallel_chart(
    title: str, rows: Sequence[Row], columns: Mapping[str, str], *, colour: str, note: str = ""
) -> Chart | None:
    """Parallel coordinates, a line a row, coloured by one metric; for sweeps.

    Args:
        title: What is drawn.
        rows: One a trial; a row without the metric of `colour` is left out.
        columns: Keys of the rows with the words over the axes; text columns become ticks.
        colour: The key that colours a line.
        note: A sentence under the title.
    """
    seen = [row for row in rows if _is_number(row.get(colour))]
    if not seen:
        return None
    dimensions = [_dimension(seen, key, label) for key, label in columns.items()]
    trace = {
        "type": "parcoords",
        "dimensions": [dimension for dimension in dimensions if dimension],
        "line": {
            "color": [row[colour] for row in seen],
            "colorscale": "Viridis",
            "showscale": True,
            "colorbar": _bar(columns.get(colour, colour)),
        },
    }
    layout = {"margin": {"l": 60, "r": 40, "t": 60, "b": 30}}
    return Chart(title, {"data": [trace], "layout": layout}, note=note, wide=True)


def _dimension(rows: Sequence[Row], key: str, label: str) -> dict[str, Any] | None:
    values: list[Any] = [row.get(key) for row in rows]
    if spans_decades(values):
        logs = list(map(math.log10, values))
        powers = range(math.floor(min(logs)), math.ceil(max(logs)) + 1)
        shown = {"tickvals": list(powers), "ticktext": [f"{10.0**power:g}" for power in powers]}
        return {"label": label, "values": logs, "range": [powers[0], powers[-1]], **shown}
    if all(_is_number(value) for value in values):
        return {"label": label, "values": values}
    words = sorted({str(value) for value in values if value is not None})
    if not words:
        return None
    positions = [words.index(str(value)) if value is not None else -1 for value in values]
    ticks = {"tickvals": list(range(len(words))), "ticktext": words}
    if -1 in positions:
        ticks = {"tickvals": [-1, *ticks["tickvals"]], "ticktext": ["-", *words]}
    return {"label": label, "values": positions, **ticks}


def spans_decades(values: Sequence[Any]) -> bool:
    """Whether values are drawn on a logarithmic axis: all positive, over two decades or more."""
    if not values or not all(_is_number(value) and value > 0 for value in values):
        return False
    return max(values) >= 100 * min(values)


def _axes(x_title: str, y_title: str) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}


def _bar(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "thickness": 10, "outlinewidth": 0}


def _points(rows: Sequence[Row], x: str, y: str) -> list[tuple[float, float]]:
    return [(row[x], row[y]) for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
