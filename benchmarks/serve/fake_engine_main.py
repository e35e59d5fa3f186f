"""A fake engine in a process of its own, as `quengine.serve.processes.engine_main` runs a model; see `FakeProcess`."""

import sys
from collections.abc import Mapping
from typing import Any

from quengine.kernels.child_process import end_with_parent, parent_channel
from quengine.platform import collector
from quengine.serve.processes.engine_main import EngineLoop
from quengine.serve.processes.server_engine import ProcessEngine
from quengine.serve.processes.shared_heartbeat import Heartbeat
from quengine.serve.processes.shared_wire import TO_ENGINE, Load, Ready
from tests.engine.serve.fake_engine import FakeEngine, FakeModel


class FakeProcess(ProcessEngine):
    """A `ProcessEngine` whose process runs a `FakeEngine` with these options: what the server costs by itself."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._start("benchmarks.serve.fake_engine_main")
        self._send(Load("", options))
        ready = self._loaded(lambda _: None, lambda *_: False)
        self.model = FakeModel(ready.ctx_size)
        self.capacity = ready.capacity


def main() -> int:
    collector.starting()
    channel = parent_channel(TO_ENGINE)
    end_with_parent()
    Heartbeat(int(sys.argv[2])).keep_beating()
    wanted = channel.receive()
    assert isinstance(wanted, Load)
    engine = FakeEngine(**wanted.options)
    channel.send(Ready(engine.capacity, engine.model.ctx_size, "cpu", 0, ()))
    collector.working()
    EngineLoop(channel, engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
