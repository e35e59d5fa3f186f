"""What /metrics says of images: how many were encoded, and how many were found kept."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from quengine.request.feature_cache import ImageCounts
from quengine.serve.engine_metrics import EngineMetrics
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import EngineStats
from tests.engine.fake_vision import seeing, write_model
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import serving

PICTURE = bytes(range(40, 90))


def text(counts: ImageCounts | None) -> str:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: EngineStats(images=counts)))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def test_counts_are_those_of_the_engine(tmp_path: Path) -> None:
    with seeing(write_model(tmp_path / "m.gguf")) as (llm, vision):
        for image in (PICTURE, PICTURE[::-1], PICTURE):
            llm.with_images("<image>", [image])
        counts = LLMEngine(llm).stats().images
        nbytes = 2 * len(PICTURE) * vision.text_size * 4
    assert counts == ImageCounts(2, 2, 1, 2, nbytes)
    lines = text(counts).splitlines()
    for line in (
        "quengine_images_encoded_total 2.0",
        "quengine_image_batches_total 2.0",
        "quengine_images_found_total 1.0",
        "quengine_images_kept 2.0",
        f"quengine_image_cache_bytes {float(nbytes)}",
        "quengine_image_device_bytes 0.0",
    ):
        assert line in lines, line


def test_a_model_that_reads_text_has_no_such_metrics() -> None:
    assert text(None) == ""
    with serving(FakeEngine) as served, served.http() as client:
        assert "quengine_image" not in client.get("/metrics").text
