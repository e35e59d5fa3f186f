"""What a decode step costs the host in the engine's process, without a device: scheduler, slots, text, events.

    python -m benchmarks.serve.step_host_cost [-m smollm2-135m] [--streams 64 256] [--steps 100] [--profile]

The model's tokenizer and the engine are real; in place of the graphs, steps give random tokens at once. On a GPU all of
this is hidden behind a step as long as it takes less time. Prints microseconds a step, and of these the encoding for
the server's process.
"""

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from quengine.kernels.channel import encode
from quengine.llm import LLM
from quengine.platform import collector
from quengine.request.sampling_params import SamplingParams
from quengine.runners.cuda_graphs import LaunchedStep
from quengine.runners.device_decode import DeviceDecoder
from quengine.runners.graph_keys import SamplingKind, padded_rows
from quengine.runners.static_inputs import DecodeInputs
from quengine.serve.processes.engine_llm import LLMEngine
from quengine.serve.processes.shared_engine import GenerationRequest
from quengine.serve.processes.shared_wire import Step
from quengine.slot import Slot
from quengine.step_plan import TOKENS_ALONE, GivenRows, SequenceRows, StepPlan

PROMPT = 128


class Event:
    """The end of a step that is there at once."""

    def synchronize(self) -> None: ...


END: Any = Event()


class Graphs:
    """`CudaGraphs` that compute nothing."""

    shares_sequences = False

    def __init__(self, sequences: int, blocks: int, vocab: int) -> None:
        self.rows = padded_rows(sequences)
        self.inputs = DecodeInputs(self.rows, sequences, blocks, 1, torch.device("cpu"))
        numbers = random.Random(1)
        self._tokens = torch.tensor(
            [[numbers.randrange(100, vocab) for _ in range(self.rows)] for _ in range(16)]
        )
        self._launched = 0

    def launch(
        self,
        slots: list[Slot],
        given: dict[int, SequenceRows],
        kind: SamplingKind,
        on_host: Sequence[int] = (),
    ) -> LaunchedStep:
        del kind, on_host
        self.inputs.set_rows(slots, given)
        self.inputs.send()
        self._launched += 1
        return self._tokens[self._launched % 16], END, {}

    def prefill(
        self,
        rows: Sequence[SequenceRows],
        slots: list[int],
        kind: SamplingKind,
        on_host: Sequence[int] = (),
        given: GivenRows = TOKENS_ALONE,
    ) -> LaunchedStep:
        del slots, kind, on_host, given
        return torch.full((len(rows),), 100), END, {}

    def configure(self, *settings: Any) -> None:
        """Settings of a slot, which are sent once a sequence."""

    def set_adapters(self, *settings: Any) -> None:
        """Does nothing: the model has no adapters."""


def measure(given: argparse.Namespace, streams: int) -> None:
    tokens = given.steps + 2 * streams  # the first go on while the last prompts are taken
    with LLM(given.model, device="cpu", ctx_size=PROMPT + tokens + 1, parallel=streams) as llm:
        graphs: Any = Graphs(streams, -(-llm.ctx_size // 32), llm.model_config.vocab_size)
        decoder = DeviceDecoder(graphs)

        def launch(plan: StepPlan) -> StepPlan:
            if plan.phase == "prefill":
                decoder.launch_prompts(plan)
            else:
                assert decoder.launch(plan)
            return plan

        llm.runner.launch = launch  # type: ignore[method-assign]
        engine = LLMEngine(llm)
        params = SamplingParams(temperature=0.7, max_tokens=tokens, ignore_eos=True, seed=1)
        for number in range(streams):
            numbers = random.Random(number)
            engine.add(GenerationRequest([numbers.randrange(1000) for _ in range(PROMPT)], params))
        collector.working()
        while llm.scheduler.waiting or llm.scheduler.prefilling:
            engine.step()
        times, encoding, profile = list[float](), list[float](), cProfile.Profile()
        for _ in range(given.steps):
            began = time.thread_time()
            if given.profile:
                profile.enable()
            events = engine.step()
            computed = time.thread_time()
            encode(Step(events))
            profile.disable()
            encoding.append(time.thread_time() - computed)
            times.append(time.thread_time() - began)
        times.sort()
        encoding.sort()
        middle = given.steps // 2
        print(
            f"{streams} streams: {1e6 * times[middle]:.0f} us a step, {1e6 * encoding[middle]:.0f} of it encoding"
        )
        if given.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for streams in given.streams:
        measure(given, streams)


if __name__ == "__main__":
    main()
