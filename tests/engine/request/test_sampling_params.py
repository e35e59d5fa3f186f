"""SamplingParams: llama.cpp's defaults, one-line errors for every range, nothing shared with the caller."""

import math
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.request.sampling_params import MAX_SEED, SamplingParams
from quengine.structured.constraint_spec import ConstraintSpec


def test_defaults_are_those_of_llama_cpp() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    theirs = xllamacpp.CommonParams().sampling
    ours = SamplingParams()
    for mine, other in [
        (ours.temperature, theirs.temp),
        (ours.top_k, theirs.top_k),
        (ours.top_p, theirs.top_p),
        (ours.min_p, theirs.min_p),
        (ours.repeat_last_n, theirs.penalty_last_n),
    ]:
        assert mine == pytest.approx(other, rel=1e-6)
    assert (ours.typical_p, ours.repeat_penalty) == (theirs.typ_p, theirs.penalty_repeat)
    assert (ours.presence_penalty, ours.frequency_penalty) == (theirs.penalty_present, theirs.penalty_freq)
    assert (ours.max_tokens, ours.seed, ours.logprobs, ours.stop, ours.n) == (None, None, None, (), 1)


@pytest.mark.parametrize(
    ("field", "bad", "rule"),
    [
        ("max_tokens", -1, "from 0 to 2147483647"),
        ("max_tokens", 1.5, "from 0 to 2147483647"),
        ("max_tokens", True, "from 0 to 2147483647"),
        ("temperature", -0.1, "from 0 to"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "finite"),
        ("top_k", -2, "from -1 to 2147483647"),
        ("top_k", 40.0, "whole number"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("typical_p", math.nan, "from 0 to 1"),
        ("repeat_penalty", 0.0, "above 0"),
        ("repeat_last_n", -2, "from -1 to 2147483647"),
        ("presence_penalty", math.inf, "finite"),
        ("frequency_penalty", None, "finite"),
        ("seed", -1, "from 0 to 18446744073709551615"),
        ("seed", MAX_SEED + 1, "from 0 to 18446744073709551615"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", -1, "from 0 to"),
        ("n", 0, "from 1 to 2147483647"),
        ("stop", ("",), "at least one character"),
        ("stop", (7,), "at least one character"),
        ("stop", 7, "strings"),
        ("stop_token_ids", (-1,), "from 0 to"),
        ("stop_token_ids", 5, "token ids"),
        ("logit_bias", {-1: 1.0}, "from 0 to"),
        ("logit_bias", {5: -1e300}, "from -1000000000 to 1000000000"),
        ("top_k", 2**64, "from -1 to 2147483647"),
        ("temperature", 1e308, "from 0 to 1000000"),
        ("stop", ("a\ud800",), "surrogate"),
        ("logit_bias", {5: math.inf}, "-inf to ban"),
        ("logit_bias", {5: math.nan}, "-inf to ban"),
        ("logit_bias", [5], "map token ids"),
    ],
)
def test_a_value_out_of_range_is_one_line_with_field_value_and_range(field: str, bad: Any, rule: str) -> None:
    with pytest.raises(EngineError) as caught:
        replace(SamplingParams(), **{field: bad})
    message = str(caught.value)
    assert field in message
    assert rule in message
    offenders = [
        bad,
        *(bad if isinstance(bad, tuple) else ()),
        *([*bad, *bad.values()] if isinstance(bad, dict) else ()),
    ]
    assert any(repr(value) in message for value in offenders)
    assert "\n" not in message


def test_values_at_the_edges_are_accepted() -> None:
    params = SamplingParams(max_tokens=1, temperature=0, top_k=-1, top_p=0.0, min_p=1.0, typical_p=1)
    assert SamplingParams(repeat_last_n=-1, seed=MAX_SEED, logprobs=0, logit_bias={0: -math.inf}).seed
    assert params.greedy
    assert not SamplingParams().greedy


def test_a_single_stop_string_is_not_taken_apart_into_characters() -> None:
    assert SamplingParams(stop="###").stop == ("###",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_parameters_are_frozen_hashable_and_do_not_follow_the_callers_dict() -> None:
    bias = {3: 1}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 9
    assert params.logit_bias == {3: 1.0}
    assert isinstance(params.logit_bias[3], float)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert len({params, SamplingParams(logit_bias={3: 1.0})}) == 1
    assert SamplingParams(**asdict(params)) == params


def test_a_seed_is_drawn_once_and_a_given_one_is_kept() -> None:
    drawn = SamplingParams().with_seed()
    assert drawn.seed is not None and 0 <= drawn.seed < 2**32
    assert drawn.with_seed() is drawn
    assert SamplingParams(seed=7).with_seed().seed == 7
    assert len({SamplingParams().with_seed().seed for _ in range(8)}) > 1


def test_penalties_are_off_by_default_and_without_a_window() -> None:
    assert not SamplingParams().penalizes
    assert not SamplingParams(repeat_penalty=1.3, repeat_last_n=0).penalizes
    assert SamplingParams(repeat_penalty=1.3).penalizes
    assert SamplingParams(presence_penalty=-0.5).penalizes
    assert SamplingParams(frequency_penalty=0.1, repeat_last_n=-1).penalizes


def test_a_constraint_is_a_specification_and_nothing_else() -> None:
    spec = ConstraintSpec.regex("a")
    assert SamplingParams(constraint=spec).constraint == spec
    with pytest.raises(EngineError, match=r"constraint = 'a'.*ConstraintSpec"):
        SamplingParams(constraint="a")  # type: ignore[arg-type]
