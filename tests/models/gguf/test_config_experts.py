"""The mixture of experts in GGUF metadata: what each key means, and one line for each value that is refused."""

from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED, RouterKind
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from tests.each_case import each_case
from tests.gguf_builder import GGUFBuilder, ModelSizes, spm_vocabulary

NAN, INF = float("nan"), float("inf")


def config(folder: Path, architecture: str = "llama", blocks: int = 4, **changes: Any) -> ModelConfig:
    """Of a file of 8 experts without tensors; a change to None drops the key."""
    sizes = ModelSizes(architecture, blocks, experts=8)
    values = {**sizes.metadata(), **spm_vocabulary()}
    builder = GGUFBuilder()
    for key, value in (values | {f"{architecture}.{key}": value for key, value in changes.items()}).items():
        if isinstance(value, tuple):
            builder.kv(key, *value)
        elif value is not None:
            builder.kv(key, value)
    with open_gguf(builder.write(folder / "m.gguf")) as file:
        return read_gguf_config(file)


def experts(folder: Path, architecture: str = "llama", **changes: Any) -> ExpertConfig:
    found = config(folder, architecture, **changes).experts
    assert found is not None
    return found


def test_a_file_that_says_nothing_of_its_router_has_that_of_llama_cpp(tmp_path: Path) -> None:
    assert experts(tmp_path) == ExpertConfig(8, RouterKind(2, "softmax", normalized=True), 96)
    assert experts(tmp_path, "olmoe") == ExpertConfig(8, RouterKind(2, "softmax", normalized=False), 96)
    assert experts(tmp_path, "qwen3moe") == ExpertConfig(8, RouterKind(2, "softmax", normalized=True), 32)
    expected = ExpertConfig(8, RouterKind(2, "softmax", normalized=False), 32, 64)
    assert experts(tmp_path, "qwen2moe") == expected


def test_a_llama_without_experts_is_dense(tmp_path: Path) -> None:
    assert config(tmp_path, expert_count=0).experts is None
    assert config(tmp_path, expert_count=None, expert_used_count=None).experts is None
    assert not config(tmp_path, expert_count=0).has_experts(0)


@pytest.mark.parametrize(
    ("number", "scores"), [(0, "softmax"), (1, "softmax"), (2, "sigmoid"), (3, "softmax_of_chosen")]
)
def test_scores_by_their_number(tmp_path: Path, number: int, scores: str) -> None:
    assert experts(tmp_path, expert_gating_func=number).router.scores == scores


def test_keys_replace_what_is_declared(tmp_path: Path) -> None:
    router = experts(
        tmp_path,
        expert_weights_norm=False,
        expert_weights_scale=2.5,
        expert_group_count=4,
        expert_group_used_count=2,
    ).router
    assert router == RouterKind(2, "softmax", normalized=False, scale=2.5, groups=4, groups_used=2)


def test_a_scale_or_number_of_groups_of_0_says_nothing(tmp_path: Path) -> None:
    changed = experts(tmp_path, expert_weights_scale=0.0, expert_group_count=0, expert_group_used_count=0)
    assert changed == experts(tmp_path)


def test_lengths_of_experts_and_of_shared_ones(tmp_path: Path) -> None:
    assert experts(tmp_path, expert_feed_forward_length=24).feed_forward_length == 24
    assert experts(tmp_path, expert_shared_feed_forward_length=40).shared_feed_forward_length == 40
    changes = {"expert_feed_forward_length": 24, "expert_shared_count": 2}
    assert experts(tmp_path, **changes).shared_feed_forward_length == 48
    changes["expert_shared_feed_forward_length"] = 40
    assert experts(tmp_path, **changes).shared_feed_forward_length == 40


def test_sizes_may_be_given_for_each_layer_if_all_agree(tmp_path: Path) -> None:
    changes = {"expert_used_count": [3] * 4, "expert_feed_forward_length": [24] * 4}
    found = experts(tmp_path, **changes)
    assert (found.router.used, found.feed_forward_length) == (3, 24)
    with pytest.raises(GGUFError, match=r"expert_used_count .*: differs between layers \(2, 3\)"):
        experts(tmp_path, expert_used_count=[2, 3, 3, 3])


def test_leading_layers_may_be_dense(tmp_path: Path) -> None:
    found = config(tmp_path, leading_dense_block_count=3)
    assert [found.has_experts(layer) for layer in range(4)] == [False, False, False, True]


WRONG: dict[str, list[Any]] = {
    "expert_count": [MOST_EXPERTS + 1, (-1, "int32"), (2**63, "uint64"), 8.0, "8", True, [8, 4, 8, 8]],
    "expert_used_count": [None, 0, 9, (-1, "int32"), (2**63, "uint64"), 2.0, "2", False, []],
    "expert_feed_forward_length": [0, (-1, "int32"), 2**24 + 1, (2**63, "uint64"), 32.0, "32", [32, 64]],
    "expert_shared_feed_forward_length": [(-1, "int32"), 2**24 + 1, (2**63, "uint64"), 1.0, True],
    "expert_shared_count": [(-1, "int32"), MOST_EXPERTS + 1, (2**63, "uint64"), 1.0, "1"],
    "leading_dense_block_count": [4, 5, (-1, "int32"), (2**63, "uint64"), 1.0, True],
    "expert_weights_norm": [0, 1, 1.0, "true"],
    "expert_weights_scale": [NAN, INF, -INF, -1.0, 1, "1"],
    "expert_gating_func": [4, 5, (-1, "int32"), 2**31, (2**63, "uint64"), 1.0, "softmax"],
    "expert_group_count": [3, 16, (-1, "int32"), (2**63, "uint64"), 2.0, True],
}
OF_GROUPS: list[Any] = [None, 0, 5, (-1, "int32"), (2**63, "uint64"), 1.0, "1"]


@each_case(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_values_out_of_range_or_of_another_type_are_refused_by_key(
    tmp_path: Path, key: str, value: Any
) -> None:
    groups = {"expert_group_used_count": 1} if key == "expert_group_count" else {}
    with pytest.raises(GGUFError) as caught:
        config(tmp_path, **groups, **{key: value})
    assert caught.value.field == f"llama.{key}"
    assert "\n" not in str(caught.value)


@each_case("value", OF_GROUPS)
def test_groups_used_are_refused_by_key(tmp_path: Path, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        config(tmp_path, expert_group_count=4, expert_group_used_count=value)
    assert caught.value.field == "llama.expert_group_used_count"


def test_groups_must_have_as_many_experts_as_a_row_chooses(tmp_path: Path) -> None:
    changes = {"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3}
    with pytest.raises(GGUFError, match=r"expert_group_used_count .*: 1 groups have fewer than 3 experts"):
        config(tmp_path, **changes)


def test_a_length_beyond_the_limit_by_the_number_of_shared_experts_is_refused(tmp_path: Path) -> None:
    changes = {"expert_feed_forward_length": 2**24, "expert_shared_count": 2}
    with pytest.raises(GGUFError, match=r"expert_shared_feed_forward_length: 33554432 is not from 0 to"):
        config(tmp_path, **changes)


def test_the_largest_values_are_read(tmp_path: Path) -> None:
    found = experts(tmp_path, expert_count=MOST_EXPERTS, expert_used_count=MOST_EXPERTS_USED)
    assert (found.count, found.router.used) == (MOST_EXPERTS, MOST_EXPERTS_USED)
    with pytest.raises(GGUFError, match=f"{MOST_EXPERTS_USED + 1} is not from 1 to {MOST_EXPERTS_USED}"):
        experts(tmp_path, expert_count=MOST_EXPERTS, expert_used_count=MOST_EXPERTS_USED + 1)


@pytest.mark.parametrize("architecture", ["mistral3", "qwen3"])
def test_architectures_without_experts_name_those_that_are_supported(
    tmp_path: Path, architecture: str
) -> None:
    with pytest.raises(EngineError, match=r"8 experts .* is not supported; supported are llama, .*qwen3moe"):
        config(tmp_path, architecture)
