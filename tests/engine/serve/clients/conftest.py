"""Servers for the clients: one that says given texts, and one with a tiny model that is held to schemas."""

from collections.abc import Iterator

import pytest

from quengine.request.sampling_params import SamplingParams
from quengine.serve.processes.shared_engine import Event, Failed
from tests.engine.serve.fake_engine import FakeEngine, _Sequence
from tests.engine.serve.serving import KEY, Served, serving
from tests.engine.serve.speaking_engine import SpeakingEngine, SpeakingModel
from tests.engine.serve.tool_model import serving_tools

THOUGHT, HELLO = "They greet. “Hé!”", "Hello! “Ça va?”"
_ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
_CALL = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
_RECORD = '{"name": "Ann", "age": 7}'
SAYS = {
    "greet": f"{_ANALYSIS}<|channel|>final<|message|>{HELLO}",
    "greet\n\n": f"<|channel|>final<|message|>{HELLO}",
    "weather": _ANALYSIS + _CALL % ("weather", '{"city": "Paris"}'),
    "sunny": "<|channel|>final<|message|>It is sunny.",
    "record": f"<|channel|>final<|message|>{_RECORD}",
    "call Record": _CALL % ("Record", _RECORD),
    "xxx": f"<|channel|>final<|message|>{HELLO}",
    "flaky": f"<|channel|>final<|message|>{HELLO}",
}
"""The answer to a prompt that ends so; as litellm writes one for Ollama's `generate`, it ends with two newlines."""


class _Model(SpeakingModel):
    def prepare(self, params: SamplingParams) -> None:
        """Takes constraints; the texts are as they are."""


class _Engine(SpeakingEngine):
    """Fails the first request whose prompt ends with "flaky"."""

    failed = False

    def _advance(self, sequence: _Sequence) -> list[Event]:
        request = sequence.request
        if request.pooling is not None:
            return FakeEngine._advance(self, sequence)
        if not self.failed and self.model.decode(request.prompt).endswith("flaky"):
            self.failed = True
            self.cancel(request.id)
            return [Failed(request.id, "the first one fails")]
        return super()._advance(sequence)


@pytest.fixture(scope="module")
def speaking() -> Iterator[Served]:
    settings = {"defaults": SamplingParams(), "api_keys": (KEY,)}
    with serving(lambda: _Engine(SAYS, _Model(4096)), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("clients"), 4, context=4096) as running:
        yield running
