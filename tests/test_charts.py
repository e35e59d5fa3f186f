"""The charts in the tree are those of the figures in the tree."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks.charts import CHARTS, PICTURES, RESULTS, WORK, pictures
from quengine.cli.charts import LIGHT, Bar, Cell, Chart, Row, page, svg


def texts(drawn: str) -> set[str | None]:
    return {each.text for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("text")}


def test_the_charts_are_drawn_from_the_figures() -> None:
    drawn = pictures()
    assert {name: (PICTURES / name).read_text() for name in drawn} == drawn, (
        "python -m benchmarks.charts draws them anew"
    )
    for row in json.loads((RESULTS / CHARTS["speed"][0]).read_text())["rows"]:
        assert {row["model"], WORK[row["work"]], f"{row['quengine']:,.0f}"} <= texts(drawn["speed-dark.svg"])


def test_bars_are_as_long_as_they_say_and_rows_as_high_as_their_bars() -> None:
    cell = Cell([Bar(1, "1"), Bar(0.5, "a < b", 1, mark=0.75), Bar(0, "0")], "2x")
    chart = Chart("title", "about", ["one", "two"], [Row("a", "", [None, cell]), Row("b", "", [cell, None])])
    drawn = svg(chart, LIGHT)
    assert {"title", "about", "one", "two", "a", "b", "a < b", "2x"} <= texts(drawn)
    rects = [each for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("rect")]
    widths = [float(each.attrib["width"]) for each in rects]
    assert widths == 2 * [150, 75, 1.5, 0]
    assert float(rects[4].attrib["y"]) - float(rects[0].attrib["y"]) == chart.rows[0].height == 61


@pytest.mark.parametrize("report", ["", "1 < 2"])
def test_a_page_needs_nothing_else_and_is_escaped(report: str) -> None:
    made = page("a <b>", "c & d", [Chart("t", "", [], [])], report=report)
    assert "<h1>a &lt;b&gt;</h1><p>c &amp; d</p>" in made
    assert ("<pre>1 &lt; 2</pre>" in made) == bool(report)
    assert "<svg" in made and "src=" not in made and "href=" not in made
