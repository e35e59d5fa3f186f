"""The page of `engine parity --html`: how far the sides are apart beside what the budgets allow, and the report."""

import math
from collections.abc import Sequence

from quengine.cli.charts import Bar, Cell, Chart, Row, page
from quengine.diagnostics.parity.parity import ParityReport
from quengine.diagnostics.parity.parity_locate import Location

_LEAST = -13
"""Power of ten at which bars begin."""


def error_bar(value: float, limit: float) -> Bar:
    """A normalised mean squared error on a scale of powers of ten, which ends ten times above the limit."""
    top = math.log10(max(limit, 10.0**_LEAST)) + 1

    def place(of: float) -> float:
        return 0.0 if of <= 0 else min(1.0, max(0.0, (math.log10(of) - _LEAST) / (top - _LEAST)))

    shown = "not finite" if math.isinf(value) else f"{value:.1e}"
    return Bar(place(value), shown, mark=place(limit))


def phases_chart(report: ParityReport) -> Chart:
    """A row for each phase: logits and cached rows."""
    rows = []
    for name, m in report.phases.items():
        budget = report.budgets[name]
        errors = (
            (m.nmse_median, budget.nmse_median),
            (m.nmse_p99, budget.nmse_p99),
            (m.nmse_max, budget.nmse_max),
            (m.cached_p99, budget.nmse_p99),
        )
        cells = [None if math.isnan(value) else Cell([error_bar(value, limit)]) for value, limit in errors]
        rows.append(Row(name, f"{m.positions:,} positions", cells))
    columns = ("NMSE, median", "NMSE, 99th percentile", "NMSE, largest", "Keys and values, 99th percentile")
    about = "Normalised mean squared error of logits, in powers of ten; the line is the budget"
    return Chart(f"{report.b} against {report.a}", about, columns, rows)


def operations_chart(located: Location) -> Chart:
    """A row for each operation: the largest error of any layer, on the same inputs."""
    names = dict.fromkeys(found.operation for found in located.operations)
    rows = []
    for name in names:
        worst = max(
            (found for found in located.operations if found.operation == name),
            key=lambda found: math.inf if math.isnan(found.nmse) else found.nmse / found.budget,
        )
        value = math.inf if math.isnan(worst.nmse) else worst.nmse
        rows.append(Row(name, worst.place, [Cell([error_bar(value, worst.budget)])]))
    about = "Largest NMSE of each operation on the same inputs; the line is its budget"
    return Chart(f"{located.phase.capitalize()}, operation by operation", about, ("NMSE",), rows)


def parity_page(report: ParityReport, located: Sequence[Location], text: str, verdict: str) -> str:
    """An HTML document with the charts, and the report as the terminal has it."""
    charts = [phases_chart(report), *(operations_chart(each) for each in located)]
    return page("Numbers on this machine", verdict, charts, report=text)
