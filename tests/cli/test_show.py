"""`engine show`: whole models, vocabularies alone, models that cannot run, folders; text and JSON."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quengine.cli.commands.show import show
from quengine.errors import EngineError
from quengine.loading.placement import part_of
from quengine.memory import kv_cache_bytes
from quengine.models.checkpoint import open_checkpoint
from quengine.models.parameter_counts import count_text
from quengine.models.synthetic.synthetic import PRESETS, write_synthetic
from quengine.models.tensor_split import Rank
from tests.gguf_builder import GGUFBuilder, ModelSizes, bpe_vocabulary, model_builder, spm_vocabulary
from tests.hf_writer import hf_config, random_weights, write_hf


def shown(capsys, path, **flags) -> str:
    show(model=str(path), **flags)
    return capsys.readouterr().out


def as_json(capsys, path, **flags) -> dict:
    return json.loads(shown(capsys, path, as_json=True, **flags))


@pytest.fixture
def tiny(tmp_path):
    return write_synthetic(tmp_path / "tiny.gguf", PRESETS["tiny"])


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="torch tells the memory of a GPU")
def test_a_model_is_shown_without_torch(tiny):
    code = "import sys; from quengine.cli.main import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "show", str(tiny)], capture_output=True, text=True, check=True
    )
    assert "architecture  llama" in done.stdout and done.stdout.splitlines()[-1] == "False"


def test_a_whole_model(capsys, tiny):
    text = shown(capsys, tiny)
    assert "architecture  llama" in text
    assert "context       4096 tokens" in text
    assert "attention     8 heads of 64, 2 key/value heads" in text
    assert "weights 3.2 MiB + KV cache 4.0 MiB" in text
    assert "bos 1 '<s>'" in text
    assert "blk.*.ffn_down.weight" in text and "Q6_K" in text
    assert "the whole context fits" in text
    assert "cannot run" not in text and "blk.0." not in text


def test_the_projector_beside_a_model(capsys, tiny):
    assert as_json(capsys, tiny)["projector"] is None and "\nimages" not in shown(capsys, tiny)
    projector = tiny.with_name("mmproj-F16.gguf")
    projector.write_bytes(b"")
    assert as_json(capsys, tiny)["projector"] == str(projector)
    assert "images        mmproj-F16.gguf" in shown(capsys, tiny)


@pytest.mark.parametrize(
    ("architecture", "lines"),
    [
        ("bert", ["attention     4 heads of 16, 4 key/value heads", "positions     learned, 128"]),
        ("modern-bert", ["tokens, sliding window 8 in 1 of 2 layers", "embeddings    pooling mean"]),
        ("gemma-embedding", ["attention     4 heads of 16, 2 key/value heads", "bidirectional attention"]),
    ],
)
def test_an_encoder(capsys, tmp_path, architecture, lines):
    text = shown(capsys, model_builder(ModelSizes(architecture)).write(tmp_path / "m.gguf"))
    assert all(line in text for line in lines), text


def test_the_numbers_in_json_are_those_of_the_file(capsys, tiny):
    value = as_json(capsys, tiny)
    assert value["problem"] is None
    assert value["file_bytes"] == tiny.stat().st_size
    assert value["config"]["head_count_kv"] == 2
    assert (
        value["parameters"]
        == 2 * 1024 * 512 + 2 * (2 * 512**2 + 2 * 128 * 512 + 3 * 512 * 1024 + 2 * 512) + 512
    )
    assert sum(g["nbytes"] for g in value["tensor_groups"]) == value["weight_bytes"]
    (cpu, *_) = value["devices"]
    assert cpu["device"] == "cpu" and cpu["kv_cache_bytes"] == 2 * 2 * 2 * 64 * 4096 * 2
    assert value["tokenizer"]["special"]["eos"] == [2, "</s>"]
    assert "tensors" not in value


def test_every_tensor_on_request(capsys, tiny):
    assert "blk.1.attn_v.weight" in shown(capsys, tiny, tensors=True)
    rows = {row["name"]: row for row in as_json(capsys, tiny, tensors=True)["tensors"]}
    assert rows["output.weight"] == {
        "name": "output.weight",
        "type": "Q6_K",
        "shape": [1024, 512],
        "nbytes": 430080,
    }


def test_a_vocabulary_alone(capsys, tmp_path):
    values = {**ModelSizes().metadata(), **spm_vocabulary()}
    text = shown(capsys, GGUFBuilder().kvs(values).write(tmp_path / "v.gguf"))
    assert "a vocabulary only" in text and "264 tokens" in text
    text = shown(capsys, GGUFBuilder().kvs(bpe_vocabulary()).write(tmp_path / "v.gguf"))
    assert "gpt2 (gpt-2), 260 tokens, 3 merges" in text and "cannot run" in text


def test_an_architecture_that_cannot_run_is_still_described(capsys, tmp_path):
    builder = model_builder(changes={"general.architecture": "falcon-h1"})
    value = as_json(capsys, builder.write(tmp_path / "g.gguf"))
    assert "'falcon-h1' is not supported; supported are llama" in value["problem"]
    assert value["config"] is None and value["devices"] == [] and len(value["tensor_groups"]) == 12


def test_a_damaged_vocabulary_is_said_so(capsys, tmp_path):
    builder = model_builder(changes={"tokenizer.ggml.bos_token_id": 999})
    text = shown(capsys, builder.write(tmp_path / "d.gguf"))
    assert "damaged" in text and "999 is not a token" in text


def test_a_missing_tensor_is_said_so(capsys, tmp_path):
    builder = model_builder()
    builder.tensors = [t for t in builder.tensors if t.name != "blk.1.ffn_up.weight"]
    assert "blk.1.ffn_up.weight: missing" in shown(capsys, builder.write(tmp_path / "d.gguf"))


def test_templates_by_name(capsys, tmp_path):
    changes = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two!"}
    path = model_builder(changes=changes).write(tmp_path / "t.gguf")
    text = shown(capsys, path)
    assert "template      default, 3 characters" in text and "template      tool_use, 4 characters" in text
    assert as_json(capsys, path)["templates"] == {"default": "one", "tool_use": "two!"}


def test_rope_scaling_and_traits_are_shown(capsys, tmp_path):
    changes = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    path = model_builder(ModelSizes("qwen2"), tied=True, changes=changes).write(tmp_path / "q.gguf")
    text = shown(capsys, path)
    assert "in halves, base 10000, scaling yarn x4 over 128" in text
    assert "query/key/value biases, tied output" in text


def test_windows_of_some_layers_are_shown(capsys, tmp_path):
    text = shown(capsys, write_synthetic(tmp_path / "m.gguf", "gemma3-tiny"))
    assert "4096 tokens, sliding window 64 in 6 of 7 layers" in text
    assert "base 10000; base 10000 in layers with a window" in text
    text = shown(capsys, write_synthetic(tmp_path / "m.gguf", "phi3-tiny"))
    assert "4096 tokens, sliding window 64\n" in text and "merged projections" in text


def test_what_a_state_takes_is_shown(capsys, tmp_path, tiny):
    path = write_synthetic(tmp_path / "lfm2.gguf", "lfm2-tiny")
    line = "state         0.2 MiB a sequence of --parallel, whatever its length, and for each copy"
    assert line in shown(capsys, path)
    assert as_json(capsys, path)["devices"][0]["state_bytes"] == 2 * 64 * 512 * 4
    assert "state  " not in shown(capsys, tiny)


def test_every_type_counts_as_it_is_stored(capsys, tmp_path):
    builder = model_builder()
    builder.tensor("blk.0.extra", (1, 256), 21, np.zeros(110, np.uint8))  # IQ3_S
    value = as_json(capsys, builder.write(tmp_path / "i.gguf"))
    assert value["weight_bytes"] == sum(group["nbytes"] for group in value["tensor_groups"])


def test_a_checkpoint_folder(capsys, tmp_path):
    from safetensors.numpy import save_file

    config = {
        "model_type": "qwen3",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"model.norm.weight": np.ones(64, np.float16)}, tmp_path / "model.safetensors")
    value = as_json(capsys, tmp_path)
    assert value["architecture"] == "qwen3" and value["format"] == "safetensors"
    assert value["tensor_groups"] == [
        {"name": "model.norm.weight", "type": "F16", "count": 1, "parameters": 64, "nbytes": 128}
    ]
    assert value["templates"] == {"default": "{{ messages }}"}
    assert "tokenizer     none: the folder has no tokenizer.json" in shown(capsys, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer     tokenizer.json" in shown(capsys, tmp_path).splitlines()


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_a_damaged_config_json_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineError, match=r"config\.json"):
        show(model=str(tmp_path))


def test_names_from_the_file_cannot_write_to_the_terminal(capsys, tmp_path):
    changes = {"general.name": "\x1b[2Jgone", "tokenizer.ggml.pre": "\x1b]0;title\x07"}
    path = model_builder(changes=changes).tensor("\x1b[31mred", (4,)).write(tmp_path / "t.gguf")
    assert "\x1b" not in shown(capsys, path, tensors=True)


def test_exactly_one_model_is_taken(capsys, tiny):
    show(model_option=str(tiny))
    assert "synthetic tiny" in capsys.readouterr().out
    for model, option in ((None, None), (str(tiny), str(tiny))):
        with pytest.raises(EngineError, match="one model"):
            show(model=model, model_option=option)


def test_a_mixture_of_experts_has_total_and_active_parameters(capsys, tmp_path):
    path = write_synthetic(tmp_path / "experts.gguf", "qwen2moe-tiny")
    text = shown(capsys, path)
    assert "experts       16 of 256 a layer, 4 a token, and a shared one of 512" in text
    value = as_json(capsys, path)
    assert 0 < value["active_parameters"] < value["parameters"]
    assert 0 < value["active_bytes"] < value["weight_bytes"]
    assert f"active        {count_text(value['active_parameters'])} parameters a token" in text
    assert value["config"]["experts"]["router"]["used"] == 4


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_the_tensors_of_all_layers_and_experts_are_one_line_a_role(capsys, tmp_path, kind):
    sizes = ModelSizes(architecture="qwen3moe", blocks=3, experts=12, separate=True)
    path = tmp_path / "old.gguf"
    if kind == "gguf":
        model_builder(sizes, bpe_vocabulary()).write(path)
    else:
        path = write_hf(tmp_path / "folder", hf_config(sizes, 64), random_weights(sizes, 64))
    value = as_json(capsys, path)
    assert value["problem"] is None
    groups = {group["name"]: group for group in value["tensor_groups"]}
    up = groups["blk.*.ffn_up.*.weight" if kind == "gguf" else "model.layers.*.mlp.experts.*.up_proj.weight"]
    assert (up["count"], up["parameters"]) == (3 * 12, 3 * 12 * 32 * 64)
    assert not any(character.isdigit() for name in groups for character in name)
    assert sum(group["nbytes"] for group in groups.values()) == value["weight_bytes"]


@pytest.mark.parametrize(("dense", "words"), [(1, "; 1 layer without"), (2, "; 2 layers without")])
def test_layers_without_experts_are_counted(capsys, tmp_path, dense, words):
    model = replace(PRESETS["glm4moe-tiny"], dense_layers=dense)
    text = shown(capsys, write_synthetic(tmp_path / "tiny.gguf", model))
    (line,) = (line for line in text.splitlines() if line.startswith("experts "))
    assert line.endswith(words)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_options_that_refuse_the_model_are_said(capsys, tmp_path, kind):
    sizes = ModelSizes(architecture="qwen3moe", experts=4, head_dim=48, separate=True)
    path = tmp_path / "old.gguf"
    if kind == "gguf":
        model_builder(sizes, bpe_vocabulary()).write(path)
    else:
        path = write_hf(tmp_path / "folder", hf_config(sizes, 64), random_weights(sizes, 64))
    one = "blk.0.ffn_gate.0.weight" if kind == "gguf" else "model.layers.0.mlp.experts.0.down_proj.weight"
    limits = as_json(capsys, path)["limits"]
    assert limits == [
        *(
            f"--cache-type {t}: it needs a head size that is a multiple of 32, and this model's is 48"
            for t in ("q8_0", "q4_0")
        ),
        f"--expert-parallel: each expert is in a tensor of its own, as {one}",
    ]
    text = shown(capsys, path)
    assert [line for line in text.splitlines() if line.startswith("not with")] == [
        f"not with      {limit}" for limit in limits
    ]
    # Those options do refuse it.
    checkpoint = open_checkpoint(path)
    with pytest.raises(EngineError, match="--expert-parallel takes experts in one tensor"):
        part_of(checkpoint, Rank(0, 2, by_expert=True))
    with pytest.raises(EngineError, match="a q8_0 cache needs a head size"):
        kv_cache_bytes(checkpoint.config, 32, "q8_0")


def test_a_model_that_every_option_takes_has_no_limits(capsys, tmp_path):
    sizes = ModelSizes(architecture="qwen3moe", experts=4, head_dim=32)
    path = model_builder(sizes, bpe_vocabulary()).write(tmp_path / "new.gguf")
    assert as_json(capsys, path)["limits"] == []
    assert "not with" not in shown(capsys, path)
