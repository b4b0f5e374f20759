from raypo.report.charts import line_chart, scatter_chart, spans_decades
from raypo.report.page import COLOURS, Page, Table

ROWS = [{"step": 1, "a": 1.0, "b": 3.0}, {"step": 2, "a": 2.0}, {"step": 3, "a": float("nan")}]


def test_a_chart_of_figures_that_no_row_has_is_none():
    assert line_chart("x", {"run": ROWS}, "nothing") is None
    assert scatter_chart("x", {"run": ROWS}, "a", "nothing") is None


def test_what_is_missing_or_not_finite_is_no_point():
    chart = line_chart("x", {"run": ROWS}, {"a": "", "b": "the other"})
    assert chart is not None
    a, b = chart.figure["data"]
    assert (a["x"], a["y"]) == ([1, 2], [1.0, 2.0])
    assert (b["x"], b["name"]) == ([1], "the other")


def test_a_run_keeps_its_colour_when_another_lacks_the_figure():
    chart = line_chart("x", {"without": [{"step": 1}], "with": ROWS}, "a")
    assert chart is not None
    assert [trace["line"]["color"] for trace in chart.figure["data"]] == [COLOURS[1]]


def test_values_over_decades_have_a_logarithmic_axis():
    assert spans_decades([0.001, 0.1, 3.0])
    for flat in ([0.0, 100.0], [-1.0, 1.0], [1.0, 99.0], ["a", "b"], []):
        assert not spans_decades(flat)


def test_a_page_of_ones_own():
    page = Page("My sweep", subtitle="2 trials")
    page.section("Empty")
    page.section("Trials", note="Ranked.").add(Table(["trial", "score"], [["<b>", 0.123456]]), None)
    html = page.html()
    assert "<td>&lt;b&gt;</td><td>0.1235</td>" in html
    assert "Empty" not in html
