"""Bar charts as SVG, and a page of them: for `engine bench -o html`, `engine parity --html` and benchmarks/charts.py.

A chart has a row for each thing and a column for each quantity; a cell has a bar or several. The same figures give the
same bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quengine.models.gguf.whole_file import whole_file

LEFT, COLUMN, GAP, TOP, BAR = 150, 236, 20, 84, 13
"""Pixels: the rows' names, a column and the space after it, what stands above the rows, a bar."""
_ROOM = 86
"""Pixels of a column that are not the longest bar's: the bar's text, and the cell's."""


@dataclass(frozen=True)
class Theme:
    """Colours: text, the lesser text, and bars of the first and of the second series."""

    text: str
    faint: str
    ours: str
    peer: str

    @property
    def fills(self) -> tuple[str, str]:
        return self.ours, self.peer


LIGHT = Theme(text="#1f2328", faint="#59636e", ours="#0969da", peer="#c4ccd4")
DARK = Theme(text="#f0f6fc", faint="#9198a1", ours="#4493f8", peer="#4a525c")
_PAGE = Theme(text="var(--text)", faint="var(--faint)", ours="var(--ours)", peer="var(--peer)")


@dataclass(frozen=True)
class Bar:
    """length: a part of the longest bar's, from 0 to 1. mark: a limit on the same scale, drawn as a line."""

    length: float
    text: str
    series: int = 0
    mark: float | None = None


@dataclass(frozen=True)
class Cell:
    """Bars, and what stands to the right of them."""

    bars: Sequence[Bar]
    note: str = ""


@dataclass(frozen=True)
class Row:
    """cells: one for each column of the chart; None: empty."""

    name: str
    about: str
    cells: Sequence[Cell | None]

    @property
    def height(self) -> int:
        return max([2, *(len(cell.bars) for cell in self.cells if cell is not None)]) * (BAR + 2) + 16


@dataclass(frozen=True)
class Chart:
    """series: names of the bars' kinds; a legend stands where there are two."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Row]
    series: Sequence[str] = ()
    said: str = ""

    @property
    def width(self) -> int:
        return max(LEFT + len(self.columns) * (COLUMN + GAP) - GAP, 560)


def svg(chart: Chart, theme: Theme) -> str:
    """An SVG document."""
    tops = [TOP]
    for row in chart.rows:
        tops.append(tops[-1] + row.height)
    parts = list(_head(chart, theme))
    for y, row in zip(tops, chart.rows, strict=False):
        parts += [_text(0, y + 12, row.name, theme.text, 13), _text(0, y + 27, row.about, theme.faint, 11)]
    for y, row in zip(tops, chart.rows, strict=False):
        for column, cell in enumerate(row.cells):
            if cell is not None:
                parts += _bars(LEFT + column * (COLUMN + GAP), y, cell, theme)
    font = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""
    size = f'viewBox="0 0 {chart.width} {tops[-1]}" width="{chart.width}"'
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    said = f"<title>{escape(chart.said or chart.title)}</title>"
    return "\n".join([opened, said, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, fill: str, size: int = 12, extra: str = "") -> str:
    """A line of text whose baseline is at `y`."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{extra}>{escape(words)}</text>'


def _head(chart: Chart, theme: Theme) -> Iterator[str]:
    """The title, the legend and the columns' names."""
    yield _text(0, 18, chart.title, theme.text, 16, ' font-weight="600"')
    yield _text(0, 38, chart.about, theme.faint)
    for place, (name, fill) in enumerate(zip(chart.series, theme.fills, strict=False)):
        x = chart.width - 80 * (len(chart.series) - place)
        yield f'<rect x="{x}" y="8" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 17, 18, name, theme.text)
    for index, name in enumerate(chart.columns):
        yield _text(LEFT + index * (COLUMN + GAP), TOP - 14, name, theme.text, 12, ' font-weight="600"')


def _bars(x: float, y: float, cell: Cell, theme: Theme) -> Iterator[str]:
    """The bars of a cell with their texts, from `x` on."""
    room = COLUMN - _ROOM
    for line, bar in enumerate(cell.bars):
        top, width, fill = y + line * (BAR + 2), room * bar.length, theme.fills[bar.series]
        yield f'<rect x="{x:g}" y="{top:g}" width="{width:.1f}" height="{BAR}" rx="2" fill="{fill}"/>'
        if bar.mark is not None:
            at = x + room * bar.mark
            yield f'<rect x="{at:.1f}" y="{top - 1:g}" width="1.5" height="{BAR + 2}" fill="{theme.faint}"/>'
        end = x + max(width, room * (bar.mark or 0))
        yield _text(end + 5, top + 11, bar.text, theme.faint if bar.series else theme.text, 11)
    if cell.note:
        anchor = ' text-anchor="end" font-weight="600"'
        yield _text(x + COLUMN - 2, y + BAR + 5, cell.note, theme.text, 12, anchor)


def page(title: str, about: str, charts: Sequence[Chart], *, report: str = "", table: str = "") -> str:
    """An HTML document that needs no other file: charts, then a report as the terminal has it, or a table of HTML."""
    light, dark = _variables(LIGHT, "#fff"), _variables(DARK, "#0d1117")
    style = (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "body{font-family:system-ui,sans-serif;color:var(--text);background:var(--back);margin:2em auto;"
        "max-width:960px;padding:0 1em}svg{max-width:100%;height:auto;margin:1.5em 0}pre{overflow:auto;font-size:12px}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:.3em .7em;text-align:right;"
        "border-bottom:1px solid var(--peer)}td:first-child,th:first-child{text-align:left}"
    )
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
        *(svg(chart, _PAGE) for chart in charts),
        table,
        f"<pre>{escape(report)}</pre>" if report else "",
        "</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _variables(theme: Theme, back: str) -> str:
    colours = {"text": theme.text, "faint": theme.faint, "ours": theme.ours, "peer": theme.peer, "back": back}
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())


def write_page(path: Path, text: str) -> None:
    """The file appears when it is complete. Raises as `whole_file` does."""
    data = text.encode()
    with whole_file(path, len(data)) as file:
        file.write(data)
