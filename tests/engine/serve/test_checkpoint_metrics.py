"""What /metrics says of checkpoints of states: where they are, and how many were moved."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from quengine import LLM, SamplingParams
from quengine.block_manager import CheckpointCounts
from quengine.serve.engine_metrics import EngineMetrics
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import EngineStats
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import serving
from tests.engine.states import write_small
from tests.engine.test_cold_states import with_cold


def text(counts: CheckpointCounts | None) -> str:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: EngineStats(checkpoints=counts)))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def test_counts_are_those_of_the_engine(tmp_path: Path) -> None:
    path, params = write_small(tmp_path / "m.gguf", "lfm2-tiny"), SamplingParams(temperature=0, max_tokens=2)
    with LLM(
        path,
        "cpu",
        backend="reference",
        ctx_size=512,
        reuse_prefix=True,
        state_checkpoints=1,
        deterministic=True,
    ) as llm:
        with_cold(llm, 4)
        prompts = [[n, *range(3, 80)] for n in range(3)]
        for prompt in [*prompts, prompts[0]]:
            llm.generate(prompt, params)
        counts = LLMEngine(llm).stats().checkpoints
    assert counts is not None and counts.in_host and counts.from_host == 1
    lines = text(counts).splitlines()
    assert f'quengine_state_checkpoints{{memory="host"}} {float(counts.in_host)}' in lines
    assert f'quengine_state_checkpoints{{memory="device"}} {float(counts.on_device)}' in lines
    assert f'quengine_state_checkpoints_moved_total{{memory="host"}} {float(counts.to_host)}' in lines
    assert 'quengine_state_checkpoints_moved_total{memory="device"} 1.0' in lines


def test_a_model_that_keeps_none_has_no_such_metrics() -> None:
    assert text(None) == ""
    with serving(FakeEngine) as served, served.http() as client:
        assert "state_checkpoints" not in client.get("/metrics").text
