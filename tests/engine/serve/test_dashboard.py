"""The Grafana dashboard draws what /metrics has, all of it, and nothing else."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from quengine.serve.engine_metrics import EngineMetrics
from quengine.serve.processes.shared_engine import EngineStats
from tests.engine.serve.serving import serving

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"


class _Ones(SimpleNamespace):
    """Counts that are all 1, as there are none in a server without replicas, states or images."""

    def __getattr__(self, name: str) -> int:
        return 1


def exposed() -> set[str]:
    """Names of all families, counters with their ending."""
    registry, ones = CollectorRegistry(), _Ones()
    stats: Any = EngineStats(replicas=(ones,), checkpoints=ones, experts=ones, images=ones)  # type: ignore[arg-type]
    registry.register(EngineMetrics(lambda: stats))  # type: ignore[arg-type]
    with serving() as served, served.http() as client:
        text = client.get("/metrics").text + generate_latest(registry).decode()
    return {
        name
        for name in re.findall(r"^# TYPE (quengine_\w+) ", text, re.MULTILINE)
        if not name.endswith("_created")
    }


def drawn(dashboard: Any) -> set[str]:
    """Names in the panels' expressions, those of histograms without their ending."""
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    return {name.removesuffix("_bucket") for name in re.findall(r"quengine_\w+", text)}


def test_the_dashboard_draws_every_metric_and_no_other() -> None:
    assert drawn(json.loads(DASHBOARD.read_text())) == exposed()


def test_its_panels_are_apart_and_have_a_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(panels)))
    assert {name for name in used if not name.startswith("__")} == variables


def test_the_page_of_metrics_names_every_metric() -> None:
    page = (DASHBOARD.parent / "metrics.md").read_text()
    named = {name.partition("{")[0] for name in re.findall(r"`(quengine_\w+)", page)}
    assert exposed() - named == {name for name in exposed() if name.startswith("quengine_replica_")}
