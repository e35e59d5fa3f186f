"""`/set`: names, values and checks of the sampling flags."""

import math
import re

import pytest

from quengine.cli.chat.settings import changed, setting_names, settings_lines
from quengine.errors import EngineError
from quengine.request.sampling_params import SamplingParams

PARAMS = SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("temp", "0.3", "temperature", 0.3),
        ("temperature", "0", "temperature", 0.0),
        ("top_k", "5", "top_k", 5),
        ("top-k", "5", "top_k", 5),
        ("--min-p", "0.1", "min_p", 0.1),
        ("n", "20", "max_tokens", 20),
        ("n", "-1", "max_tokens", None),
        ("s", "7", "seed", 7),
        ("ignore_eos", "on", "ignore_eos", True),
        ("stop", "'a b' c", "stop", ("a b", "c")),
        ("logit_bias", "3+1 4-inf", "logit_bias", {3: 1.0, 4: -math.inf}),
    ],
)
def test_a_setting_has_the_names_of_its_flag(name: str, text: str, field: str, value: object) -> None:
    assert getattr(changed(PARAMS, name, text), field) == value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("top_p", "1.5", "top_p = 1.5: must be a finite number from 0 to 1"),
        ("temp", "nan", "temperature = nan"),
        ("top_k", "many", "/set top_k 'many': must be a whole number"),
        ("ignore_eos", "perhaps", "must be on or off"),
        ("tmp", "1", "no setting tmp; did you mean temp?"),
        ("logit_bias", "x", "must be TOKEN_ID"),
        ("stop", "'a", "No closing quotation"),
    ],
)
def test_values_that_the_flag_refuses_are_refused(name: str, text: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem.replace("?", "[?]")):
        changed(PARAMS, name, text)


def test_a_seed_of_minus_one_is_drawn_and_an_empty_list_empties() -> None:
    drawn = changed(PARAMS, "seed", "-1").seed
    assert drawn is not None and drawn != 1
    assert changed(changed(PARAMS, "stop", "x"), "stop", '""').stop == ()


def test_every_setting_is_listed_as_it_would_be_typed() -> None:
    lines = settings_lines(PARAMS)
    assert [line.split()[0] for line in lines] == setting_names()
    values = {line.split()[0]: re.split(" {2,}", line)[1] for line in lines}
    assert values["max_tokens"] == "-1" and values["temp"] == "0.8" and values["stop"] == '""'
    for name, value in values.items():
        assert changed(PARAMS, name, value) == PARAMS, name
    assert len(settings_lines(PARAMS, "top-p")) == 1
