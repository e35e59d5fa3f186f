"""Charts of what tensors cost, as SVG, HTML or PNG: kinds down, layers across, darker where a cost is larger."""

from html import escape
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

from quengine.errors import EngineError
from quengine.evaluation.by_tensor import TensorCost, TensorCosts
from quengine.models.gguf.whole_file import check_disk, whole_file

_CELL, _LEFT, _TOP = 22, 150, 60
_ENDS = (".svg", ".html", ".png")
_SCALE = 2
"""Dots of a PNG for each unit of the chart."""


class _Text(NamedTuple):
    """A line of text on a baseline. anchor: which point of the line is at x."""

    x: int
    y: int
    words: str
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"


class _Square(NamedTuple):
    """A cell; about: its tooltip."""

    x: int
    y: int
    hue: int
    light: float
    about: str


def check_chart(path: Path) -> None:
    """Raises EngineError where a chart cannot have this name, or its folder is missing."""
    if path.suffix.lower() not in _ENDS:
        raise EngineError(f"{path}: a chart is a file {', '.join(_ENDS[:-1])} or {_ENDS[-1]}")
    check_disk(path, 0)


def write_chart(path: Path, costs: TensorCosts) -> None:
    """Writes the chart; the file appears when it is complete. Raises as `check_chart` and `whole_file` do."""
    check_chart(path)
    kind = path.suffix.lower()
    if kind == ".png":
        data = png(costs)
    else:
        text = svg(costs)
        if kind == ".html":
            text = f'<!doctype html><meta charset="utf-8"><title>{escape(_title(costs))}</title>{text}\n'
        data = text.encode()
    with whole_file(path, len(data)) as file:
        file.write(data)


def svg(costs: TensorCosts) -> str:
    """The chart. Each cell has its tensors, type and cost as a tooltip; the lowest row has the sum of each layer."""
    width, height, shapes = _drawn(costs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for shape in shapes:
        if isinstance(shape, _Text):
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            size = "" if shape.size == 12 else f' font-size="{shape.size}"'
            parts.append(f'<text x="{shape.x}" y="{shape.y}"{anchor}{size}>{escape(shape.words)}</text>')
        else:
            side, colour = _CELL - 2, f"hsl({shape.hue} 80% {shape.light:.0f}%)"
            parts.append(
                f'<rect x="{shape.x}" y="{shape.y}" width="{side}" height="{side}" fill="{colour}">'
                f"<title>{escape(shape.about)}</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def png(costs: TensorCosts) -> bytes:
    """The chart as an image, without tooltips."""
    from PIL import Image, ImageDraw, ImageFont

    width, height, shapes = _drawn(costs)
    image = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
    draw = ImageDraw.Draw(image)
    places = {"start": "ls", "middle": "ms", "end": "rs"}
    for shape in shapes:
        x, y = shape.x * _SCALE, shape.y * _SCALE
        if isinstance(shape, _Text):
            font = ImageFont.load_default(shape.size * _SCALE)
            draw.text((x, y), shape.words, "black", font, anchor=places[shape.anchor])
        else:
            side = (_CELL - 2) * _SCALE - 1
            draw.rectangle((x, y, x + side, y + side), f"hsl({shape.hue},80%,{shape.light:.0f}%)")
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _drawn(costs: TensorCosts) -> tuple[int, int, list[_Text | _Square]]:
    """Width, height, and what is drawn, in order."""
    cells, layers, kinds = _cells(costs)
    most = max((cost.kl.value for cost in costs.costs), default=0.0) or 1.0
    about = f"divergence {costs.kl.value:.6f} +/- {costs.kl.error:.6f}; darkest cell {most:.6f}"
    shapes: list[_Text | _Square] = [_Text(4, 18, _title(costs), 14), _Text(4, 36, about)]
    for row, kind in enumerate([*kinds, "all"]):
        shapes.append(_Text(_LEFT - 6, _TOP + row * _CELL + _CELL - 7, kind, anchor="end"))
    for column, layer in enumerate(layers):
        x = _LEFT + column * _CELL
        shapes.append(_Text(x + _CELL // 2, _TOP - 5, layer, 9, "middle"))
        for row, kind in enumerate(kinds):
            if (cost := cells.get((kind, layer))) is not None:
                shapes.append(_cell(x, _TOP + row * _CELL, cost.kl.value / most, _about(cost)))
    sums = {layer: sum(cost.kl.value for (_, of), cost in cells.items() if of == layer) for layer in layers}
    largest = max(sums.values(), default=0.0) or 1.0
    for column, layer in enumerate(layers):
        of_layer = f"{layer}: {sums[layer]:.6f}"
        shapes.append(
            _cell(_LEFT + column * _CELL, _TOP + len(kinds) * _CELL, sums[layer] / largest, of_layer)
        )
    width, height = _LEFT + _CELL * len(layers) + 20, _TOP + _CELL * (len(kinds) + 1) + 20
    return max(width, 560), height, shapes


def _title(costs: TensorCosts) -> str:
    return f"What the types of {costs.b} cost, measured against {costs.a}"


def _cells(costs: TensorCosts) -> tuple[dict[tuple[str, str], TensorCost], list[str], list[str]]:
    """Costs by kind and layer, the layers and the kinds in the model's order."""
    cells = dict[tuple[str, str], TensorCost]()
    for cost in costs.costs:
        name = cost.names[0].removesuffix(".weight")
        layer, kind = name.split(".", 2)[1:] if name.startswith("blk.") else ("-", name)
        cells[kind, layer] = cost
    layers = sorted({layer for _, layer in cells}, key=lambda layer: int(layer) if layer.isdecimal() else -1)
    return cells, layers, list(dict.fromkeys(kind for kind, _ in cells))


def _about(cost: TensorCost) -> str:
    return f"{', '.join(cost.names)}: {cost.type_b}, {cost.kl.value:.6f} +/- {cost.kl.error:.6f}"


def _cell(x: int, y: int, share: float, about: str) -> _Square:
    """A square as dark as `share`, its share of the largest cost; blue where the cost is negative."""
    return _Square(x, y, 20 if share >= 0 else 220, 95 - 70 * min(1.0, abs(share)), about)
