"""Steps of a runner without a scheduler."""

from collections.abc import Sequence as Seq

from quengine.model_runner import ModelRunner
from quengine.request.sequence import Sequence
from quengine.sampler import Result
from quengine.slot import Slot
from quengine.step_plan import StepPlan


def with_slots(sequences: Seq[Sequence]) -> None:
    """Give each of these sequences, which no scheduler knows, a slot of its own."""
    for index, sequence in enumerate(sequences):
        sequence.slot = Slot(index)


def decode(runner: ModelRunner, sequences: Seq[Sequence]) -> list[Result]:
    """The results of a decode step."""
    results = runner.launch(StepPlan.decode(list(sequences))).results()
    for sequence in sequences:
        sequence.slot.launched -= 1
        sequence.slot.waits = False
    return results
