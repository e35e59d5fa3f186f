"""The charts in the tree are those of the figures in the tree."""

import json
from xml.etree import ElementTree

import pytest

from benchmarks.charts import PICTURES, RESULTS, THEMES, WORK, chart


@pytest.mark.parametrize("name", THEMES)
def test_the_charts_are_drawn_from_the_figures(name: str) -> None:
    drawn = chart(json.loads(RESULTS.read_text()), THEMES[name])
    assert drawn == (PICTURES / f"speed-{name}.svg").read_text(), (
        "python -m benchmarks.charts draws them anew"
    )
    document = ElementTree.fromstring(drawn)
    texts = [element.text for element in document.iter() if element.tag.endswith("text")]
    for row in json.loads(RESULTS.read_text())["rows"]:
        assert {row["model"], WORK[row["work"]], f"{row['quengine']:,.0f}"} <= set(texts)
