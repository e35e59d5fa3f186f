"""A device of some bytes for fake engines, which take what their models need of it until they are closed."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from quengine.errors import CannotRunError, EngineError
from quengine.request.sampling_params import SamplingParams
from quengine.serve.models.model_spec import ModelSpec
from quengine.serve.models.residency import MakeRoom
from quengine.serve.processes.shared_engine import Event
from quengine.serve.settings import ModelsOptions, ServerSettings
from tests.engine.serve.fake_engine import FakeEngine
from tests.engine.serve.serving import Served, serving

SETTINGS = ServerSettings(defaults=SamplingParams(max_tokens=4), parallel=8)


def spec(name: str, nbytes: int = 1, *aliases: str, **more: object) -> ModelSpec:
    settings = replace(SETTINGS, model_names=(name, *aliases), **more)  # type: ignore[arg-type]
    return ModelSpec(settings, model=name, nbytes=nbytes)


class _Engine(FakeEngine):
    def __init__(self, device: "Device", nbytes: int) -> None:
        super().__init__(step_s=0.0)
        self._device = device
        self._nbytes = nbytes
        self.model.facts = {**self.model.facts, "size": nbytes, "memory": nbytes, "device": device.name}

    def step(self) -> list[Event]:
        self._device.computes.wait(120)
        return super().step()

    def close(self) -> None:
        self._device.free += self._nbytes


class Device:
    """Loads models: one called "broken" cannot be, one called "slow" waits for `gate`. No step ends while `computes` is
    cleared."""

    def __init__(self, nbytes: int = 10, name: str = "cuda:0") -> None:
        self.free = nbytes
        self.name = name
        self.gate = threading.Event()
        self.computes = threading.Event()
        self.computes.set()
        self.loads: list[str] = []

    def launch(self, wanted: ModelSpec, make_room: MakeRoom, check: Callable[[], None]) -> FakeEngine:
        self.loads.append(wanted.name)
        if wanted.name == "broken":
            raise EngineError("its file is wrong")
        while wanted.name == "slow" and not self.gate.is_set():
            check()
            time.sleep(0.002)
        while make_room(wanted.nbytes, self.free, self.name):
            pass
        if wanted.nbytes > self.free:
            raise CannotRunError(f"needs {wanted.nbytes} bytes, free {self.free}")
        self.free -= wanted.nbytes
        return _Engine(self, wanted.nbytes)


@contextmanager
def serving_models(device: Device, *specs: ModelSpec, most: int = 0, **options: object) -> Iterator[Served]:
    """A server of these models until the block ends."""
    settings = {"model_names": (), "access_log": False, "models": ModelsOptions(most=most, **options)}  # type: ignore[arg-type]
    with serving(launch=device.launch, find=lambda: list(specs), settings=settings) as served:
        yield served


def states(served: Served) -> dict[str, str]:
    return {host.name: host.status for host in served.server.models.hosts}
