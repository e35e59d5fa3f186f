"""Options: their ranges, and `LLM(...)` taking the fields of `EngineConfig`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest

from quengine import EngineError
from quengine.config import EngineConfig, configured_by
from quengine.options import Range, check_ranges, ranges
from quengine.request.sampling_params import SamplingParams
from quengine.serve.settings import Limits


@dataclass(frozen=True)
class Example:
    size: Annotated[int | None, Range(1, 8)] = None
    share: Annotated[float, Range(above=0, high=1, text="a share")] = 1.0
    name: str = "x"


def test_the_range_of_a_field_is_read_from_its_annotation() -> None:
    assert ranges(Example) == {"size": Range(1, 8), "share": Range(above=0, high=1, text="a share")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Example(size=0), "--size 0: must be from 1 to 8"),
        (Example(size=9), "--size 9: must be from 1 to 8"),
        (Example(share=0.0), "--share 0.0: must be a share"),
    ],
)
def test_a_value_outside_its_range_is_named_with_the_range(options: Example, message: str) -> None:
    with pytest.raises(EngineError) as raised:
        check_ranges(options, "--{name} {value}")
    assert str(raised.value) == message


def test_limits_and_none_are_within_a_range() -> None:
    for options in (Example(), Example(size=1), Example(size=8), Example(share=1.0)):
        check_ranges(options, "{name} {value}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineConfig(threads=0), "threads 0: must be at least 1"),
        (lambda: EngineConfig(parallel=0), "parallel 0: must be at least 1"),
        (lambda: EngineConfig("tpu"), "device 'tpu': must be auto, cpu, cuda or cuda:N"),
        (lambda: EngineConfig(draft_tokens=3), "draft_tokens 3: nothing drafts"),
        (lambda: Limits(queue=-1), "limit queue = -1: must be at least 0"),
        (lambda: Limits(read_s=float("inf")), "limit read_s = inf: must be above 0, and finite"),
        (lambda: SamplingParams(top_p=1.5), "top_p = 1.5: must be a finite number from 0 to 1"),
    ],
)
def test_every_group_checks_its_fields(make: Any, message: str) -> None:
    with pytest.raises(EngineError) as raised:
        make()
    assert message in str(raised.value)


class Model:
    @configured_by(EngineConfig)
    def __init__(self, model: str | Path, config: EngineConfig) -> None:
        self.model, self.config = model, config


def test_a_model_takes_the_fields_of_the_configuration_by_place_and_by_name() -> None:
    made: Any = Model("m", "cpu", 64, 2, cache_type="q8_0", parallel=3)
    assert made.model == "m"
    assert made.config == EngineConfig("cpu", 64, 2, cache_type="q8_0", parallel=3)
    assert Model(model="m", device="cpu").config == EngineConfig("cpu")  # type: ignore[call-arg]
    assert Model("m", **vars(made.config)).config == made.config
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Model("m", colour="red")  # type: ignore[call-arg]


def test_a_configuration_for_another_process_has_every_field_but_the_callback() -> None:
    config = EngineConfig("cpu", threads=2, progress=print)
    values = config.values()
    assert values.keys() == {field.name for field in fields(config)} - {"progress", "make_room"}
    assert EngineConfig(**values) == config
