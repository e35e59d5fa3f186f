"""Options: their ranges, and `LLM(...)` taking the fields of `EngineConfig`."""

import inspect
import pydoc
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest

import quengine
from quengine import LLM, EngineError
from quengine.config import Configured, EngineConfig
from quengine.options import Range, check_ranges, ranges
from quengine.request.sampling_params import SamplingParams
from quengine.serve.settings import Limits

ROOT = Path(__file__).parents[2]


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
        (lambda: EngineConfig(threads="two"), "threads two: must be at least 1"),  # type: ignore[arg-type]
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


class Model(Configured):
    def _open(self, model: str | Path, config: EngineConfig) -> None:
        self.model, self.config = model, config


def test_a_model_takes_the_fields_of_the_configuration_by_place_and_by_name() -> None:
    made = Model("m", "cpu", 64, 2, cache_type="q8_0", parallel=3)
    assert made.model == "m"
    assert made.config == EngineConfig("cpu", 64, 2, cache_type="q8_0", parallel=3)
    assert Model(model="m", device="cpu").config == EngineConfig("cpu")
    assert Model("m", **vars(made.config)).config == made.config
    with pytest.raises(TypeError, match=r"^Model\(\) has no hue$"):
        Model("m", hue="red")  # type: ignore[call-arg]


def test_a_models_signature_is_that_of_the_configuration() -> None:
    """Names, kinds, defaults and types, without ranges and flags; so a field that is added to one has to be in both."""
    model, *others = inspect.signature(LLM).parameters.values()
    assert model.name == "model" and model.default is model.empty
    assert others == list(inspect.signature(EngineConfig).parameters.values())
    assert "Annotated" not in str(others)
    for parameter in others:
        assert re.search(
            rf"^        ([\w, ]+, )?{parameter.name}(, [\w, ]+)?: ", LLM.__init__.__doc__ or "", re.M
        )


def test_help_shows_one_short_line_a_parameter() -> None:
    for made in (LLM, SamplingParams):
        text = pydoc.plain(pydoc.render_doc(made))
        assert "max_tokens: int | None = None" in text or "ctx_size: int | None = None" in text
        assert "Flag(" not in str(inspect.signature(made)) and "Range(" not in text.partition("Methods")[0]


def test_an_editor_completes_names_and_shows_the_signature() -> None:
    jedi = pytest.importorskip("jedi")
    project = jedi.Project(str(ROOT), added_sys_path=[str(Path(quengine.__file__).parents[1])])
    for call, names in {
        "LLM('m', c": {"ctx_size=", "cache_type=", "chunk_size=", "cpu_moe=", "chat_template="},
        "SamplingParams(temp": {"temperature="},
        "LLM('m').gen": {"generate"},
        "LLM('m').score('a', ['b'])[0].log": {"logprob", "logprobs"},
        "LLM('m').generate('a')[0].te": {"text"},
    }.items():
        script = jedi.Script(f"from quengine import LLM, SamplingParams\n{call}", project=project)
        assert names <= {each.name for each in script.complete()}, call
    (found,) = jedi.Script("from quengine import LLM\nLLM(", project=project).get_signatures()
    assert [each.name for each in found.params][:3] == ["model", "device", "ctx_size"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM("m", n_ctx=64), "LLM() has no n_ctx: use ctx_size"),
        (lambda: LLM("m", max_model_len=64), "LLM() has no max_model_len: use ctx_size=N"),
        (lambda: LLM("m", ubatch_size=64), "LLM() has no ubatch_size: use chunk_size"),
        (lambda: LLM("m", paralel=2), "LLM() has no paralel; did you mean parallel?"),
        (lambda: LLM("m", temperature=1), "LLM() has no temperature: use SamplingParams(temperature=...)"),
        (
            lambda: LLM("m", gpu_memory_utilization=0.9),
            "LLM() has no gpu_memory_utilization: ctx_size, parallel and cache_type set the memory of the cache; "
            "`engine show MODEL` prints it",
        ),
        (
            lambda: SamplingParams(repetition_penalty=1.1),
            "SamplingParams() has no repetition_penalty: use repeat_penalty",
        ),
        (lambda: SamplingParams(max_new_tokens=9), "SamplingParams() has no max_new_tokens: use max_tokens"),
        (lambda: SamplingParams(do_sample=False), "SamplingParams() has no do_sample: use temperature=0"),
        (
            lambda: LLM("m", guided_choice=["a"]),
            "LLM() has no guided_choice: a constraint, or LLM.score, which ranks choices",
        ),
        (
            lambda: LLM("m", guided_decoding=None),
            "LLM() has no guided_decoding: use SamplingParams(constraint=...)",
        ),
        (lambda: SamplingParams(temp=0), "SamplingParams() has no temp: use temperature"),
        (lambda: SamplingParams(n_ctx=9), "SamplingParams() has no n_ctx: use LLM(ctx_size=...)"),
        (lambda: EngineConfig(n_ctx=9), "EngineConfig() has no n_ctx: use ctx_size"),
        (
            lambda: LLM.generate(None, "a", max_tokens=9),
            "generate() has no max_tokens: use SamplingParams(max_tokens=...)",
        ),
    ],
)
def test_names_of_other_programs_are_answered_with_the_right_one(make: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value) == message


def test_a_type_error_of_something_else_is_raised_as_it_is() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        LLM()  # type: ignore[call-arg]


def test_a_configuration_for_another_process_has_every_field_but_the_callback() -> None:
    config = EngineConfig("cpu", threads=2, progress=print)
    values = config.values()
    assert values.keys() == {field.name for field in fields(config)} - {"progress", "make_room"}
    assert EngineConfig(**values) == config
