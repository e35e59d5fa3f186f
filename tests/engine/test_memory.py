"""How a context is chosen, and how a run that cannot fit is refused."""

import dataclasses

import pytest

from quengine.errors import CannotRunError, EngineError
from quengine.memory import choose_context
from quengine.models.config import ModelConfig
from tests.tiny_models import small_config

GIB = 2**30


@pytest.fixture
def config() -> ModelConfig:
    return dataclasses.replace(
        small_config(), block_count=32, head_count=32, head_count_kv=8, head_dim=128, context_length=32768
    )


def test_the_models_own_context_is_taken_when_it_fits(config: ModelConfig) -> None:
    assert choose_context(config, None, 4 * GIB, 24 * GIB, "cpu") == 32768


def test_the_context_is_cut_to_what_fits(config: ModelConfig) -> None:
    chosen = choose_context(config, None, 4 * GIB, 6 * GIB, "cpu")
    assert 0 < chosen < 32768
    assert config.kv_cache_bytes(chosen) <= 2 * GIB
    assert config.kv_cache_bytes(chosen) > 1.5 * GIB


def test_a_context_that_was_asked_for_is_never_cut(config: ModelConfig) -> None:
    assert choose_context(config, 1000, 4 * GIB, 24 * GIB, "cpu") == 1000
    with pytest.raises(CannotRunError, match=r"needs 8\.25 GiB .* 32768 tokens.* free 6\.00 GiB; try -c \d+"):
        choose_context(config, 32768, 4 * GIB, 6 * GIB, "cpu")


def test_the_advice_itself_fits(config: ModelConfig) -> None:
    with pytest.raises(CannotRunError) as refused:
        choose_context(config, 32768, 4 * GIB, 6 * GIB, "cpu")
    advised = int(str(refused.value).rsplit("-c ", 1)[1])
    assert choose_context(config, advised, 4 * GIB, 6 * GIB, "cpu") == advised


def test_weights_that_do_not_fit_are_refused_with_both_numbers(config: ModelConfig) -> None:
    with pytest.raises(CannotRunError, match=r"weights 4\.00 GiB.*free 2\.00 GiB; use a smaller"):
        choose_context(config, None, 4 * GIB, 2 * GIB, "cpu")


def test_more_context_than_the_model_was_made_for_is_an_error(config: ModelConfig) -> None:
    with pytest.raises(EngineError, match="40000 tokens is more than the 32768"):
        choose_context(config, 40000, 4 * GIB, 24 * GIB, "cpu")
