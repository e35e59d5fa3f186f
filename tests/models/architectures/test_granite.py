"""Granite as a folder and as GGUF: the logits of `transformers`, the four multipliers, refusals by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.forward import one_sequence
from tests.gguf_builder import ModelSizes, model_builder
from tests.hf_writer import hf_config
from tests.models.architectures.both_files import Case, SameLogits, opened
from tests.transformers_models import DROP, edit, nmse, token_ids

SCALES = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
WITHOUT_MAMBA = {
    **SCALES,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 96,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
}


def as_released(folder: Path) -> None:
    """Newer releases of `transformers` save the kinds of layers by other names, and sizes that files had not."""
    edit(folder, layer_types=["attention"] * 2, head_dim=DROP)


def with_null(folder: Path) -> None:
    """An attention's multiplier of null, with which `transformers` 5.23 takes that of other models."""
    edit(folder, attention_multiplier=None)


CASES = {
    "plain": Case("granite", SCALES),
    "tied": Case("granite", {**SCALES, "tie_word_embeddings": True}),
    "a large epsilon": Case("granite", {**SCALES, "rms_norm_eps": 1e-2}),
    "without multipliers": Case("granite"),
    "attention alone": Case("granitemoehybrid", WITHOUT_MAMBA, edit=as_released),
    "experts": Case("granitemoe", SCALES, gate_up=True),
    "all experts, tied": Case(
        "granitemoe", {**SCALES, "num_experts_per_tok": 8, "tie_word_embeddings": True}
    ),
    "a shared expert": Case("granitemoeshared", {**SCALES, "shared_intermediate_size": 80}),
    "null": Case("granitemoe", SCALES, edit=with_null, converts=False),
}


class TestLogits(SameLogits):
    pass


def test_embeddings_are_not_divided_as_logits_are(root: Path) -> None:
    import transformers

    theirs = transformers.AutoModel.from_pretrained(root / "plain", dtype=torch.float64).eval()
    ids = token_ids(CASES["plain"].vocab)
    with torch.no_grad():
        expected = theirs(ids[None]).last_hidden_state[0]
    checkpoint = opened(root, "plain", "folder")
    decoder = Decoder(checkpoint.config, checkpoint.tensors, ReferenceBackend(keep=True), 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    ours = decoder.hidden(one_sequence(ids, blocks=2), cache)
    assert nmse(ours, expected) < 1e-5  # the cache is fp16


def test_granite_4_without_mamba_is_granite() -> None:
    released = {"model_type": "granitemoehybrid", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
    config = read_hf_config({**released, "num_attention_heads": 4, **WITHOUT_MAMBA})
    assert config.feed_forward_length == 96 and config.architecture == "granite"


def test_the_shared_experts_halves_are_views_on_the_file(root: Path) -> None:
    checkpoint = opened(root, "a shared expert", "folder")
    assert not any("copied out" in note for note in checkpoint.notes)
    gate, up = (checkpoint.tensors[f"blk.0.ffn_{kind}_shexp.weight"].data for kind in ("gate", "up"))
    assert up.data_ptr() - gate.data_ptr() == gate.numel()


def test_multipliers_go_into_epsilon_and_the_embedding(root: Path) -> None:
    for kind in ("folder", "gguf"):
        config = opened(root, "plain", kind).config
        assert config.rms_eps == pytest.approx(1e-6 / 0.22**2) and config.attention_scale == pytest.approx(
            0.15
        )
        assert config.embedding_scale == pytest.approx(12.0 / 0.22)
        assert config.logit_scale == pytest.approx(1.0 / 6.0)


@pytest.mark.parametrize("value", [0, -1.0, 1e-7, 1e7, "1", [1.0]], ids=str)
@pytest.mark.parametrize("key", SCALES)
def test_multipliers_out_of_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"^config.json: {key}: ") as caught:
        read_hf_config(hf_config(ModelSizes("granite"), 64, **{key: value}))
    assert "\n" not in str(caught.value)


GGUF_KEYS = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")


def from_metadata(tmp_path: Path, **changes: Any) -> ModelConfig:
    metadata = {f"granite.{key}": value for key, value in changes.items()}
    path = model_builder(ModelSizes("granite"), changes=metadata).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        return read_gguf_config(file)


def test_multipliers_of_zero_are_not_applied(tmp_path: Path) -> None:
    assert from_metadata(tmp_path, **dict.fromkeys(GGUF_KEYS, 0.0)) == from_metadata(tmp_path)
    assert from_metadata(tmp_path).attention_scale is None


@pytest.mark.parametrize("value", [-1.0, 1e-7, 1e7, float("nan"), float("inf"), 1, "1"], ids=str)
@pytest.mark.parametrize("key", GGUF_KEYS)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, **{key: value})
    assert caught.value.field == f"granite.{key}"


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"residual_multiplier.*too small beside an epsilon"):
        read_hf_config(hf_config(ModelSizes("granite"), 64, residual_multiplier=0.001))
    with pytest.raises(GGUFError, match="layers without rotation"):
        from_metadata(tmp_path, **{"rope.scaling.finetuned": False})
    for flag in ("attention_bias", "mlp_bias"):
        with pytest.raises(EngineError, match=flag):
            read_hf_config(hf_config(ModelSizes("granite"), 64, **{flag: True}))
