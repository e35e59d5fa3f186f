"""A chart of tensors' costs as SVG or HTML: kinds of tensors down, layers across, darker where a cost is larger."""

from html import escape
from pathlib import Path

from quengine.errors import EngineError
from quengine.evaluation.by_tensor import TensorCost, TensorCosts
from quengine.models.gguf.whole_file import check_disk, whole_file

_CELL, _LEFT, _TOP = 22, 150, 60
_ENDS = (".svg", ".html")


def check_chart(path: Path) -> None:
    """Raises EngineError where a chart cannot have this name, or its folder is missing."""
    if path.suffix.lower() not in _ENDS:
        raise EngineError(f"{path}: a chart is a file {' or '.join(_ENDS)}")
    check_disk(path, 0)


def write_chart(path: Path, costs: TensorCosts) -> None:
    """Writes the chart; the file appears when it is complete. Raises as `check_chart` and `whole_file` do."""
    check_chart(path)
    text = svg(costs)
    if path.suffix.lower() == ".html":
        text = f'<!doctype html><meta charset="utf-8"><title>{escape(_title(costs))}</title>{text}\n'
    data = text.encode()
    with whole_file(path, len(data)) as file:
        file.write(data)


def svg(costs: TensorCosts) -> str:
    """The chart; each cell has its tensor, types and cost as a tooltip, and below it each layer its sum."""
    cells, layers, kinds = _cells(costs)
    most = max((cost.kl.value for cost in costs.costs), default=0.0) or 1.0
    width = _LEFT + _CELL * len(layers) + 20
    height = _TOP + _CELL * (len(kinds) + 1) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560)}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="4" y="18" font-size="14">{escape(_title(costs))}</text>',
        f'<text x="4" y="36">divergence {costs.kl.value:.6f} +/- {costs.kl.error:.6f}; darkest cell {most:.6f}</text>',
    ]
    for row, kind in enumerate([*kinds, "all"]):
        y = _TOP + row * _CELL + _CELL - 7
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end">{escape(kind)}</text>')
    for column, layer in enumerate(layers):
        x = _LEFT + column * _CELL
        parts.append(
            f'<text x="{x + _CELL // 2}" y="{_TOP - 5}" text-anchor="middle" font-size="9">{escape(layer)}</text>'
        )
        for row, kind in enumerate(kinds):
            if (cost := cells.get((kind, layer))) is not None:
                parts.append(_cell(x, _TOP + row * _CELL, cost.kl.value / most, _about(cost)))
    sums = {layer: sum(cost.kl.value for (_, of), cost in cells.items() if of == layer) for layer in layers}
    largest = max(sums.values(), default=0.0) or 1.0
    for column, layer in enumerate(layers):
        about = f"{layer}: {sums[layer]:.6f}"
        parts.append(_cell(_LEFT + column * _CELL, _TOP + len(kinds) * _CELL, sums[layer] / largest, about))
    return "".join([*parts, "</svg>"])


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


def _cell(x: int, y: int, share: float, about: str) -> str:
    """A square whose darkness is the share of the largest; what lowers the divergence is blue."""
    light = 95 - 70 * min(1.0, abs(share))
    colour = f"hsl({20 if share >= 0 else 220} 80% {light:.0f}%)"
    size = _CELL - 2
    return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="{colour}"><title>{escape(about)}</title></rect>'
