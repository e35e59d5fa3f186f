"""gpt-oss as a folder and as GGUF: the logits of `transformers`, experts packed as MXFP4, refusals by name."""

from pathlib import Path

import pytest
import torch

from tests.models.architectures.both_files import TOLERANCE, Case, difference, of_kind, write_cases
from tests.transformers_models import edit, edit_tensors

SIZES = {
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "attention_bias": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 15e4, "factor": 4.0, "original_max_position_embeddings": 32}
WHOLE = {**YARN, "truncate": False}


def pack_experts(folder: Path) -> None:
    """As released folders have them: random codes and scales in place of the experts' matrices."""
    generator = torch.Generator().manual_seed(5)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, cols, rows = tensors.pop(name).shape
            groups = (experts, rows, cols // 32)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (*groups, 16), generator=generator, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                119, 126, groups, generator=generator, dtype=torch.uint8
            )

    edit_tensors(folder, change)
    # Without `dequantize` transformers needs a GPU.
    edit(folder, quantization_config={"quant_method": "mxfp4", "dequantize": True})


CASES = {
    "plain": Case("gpt_oss", {**SIZES, "rope_parameters": WHOLE}),
    "packed": Case("gpt_oss", {**SIZES, "rope_parameters": WHOLE}, edit=pack_experts),
    "default yarn": Case("gpt_oss", SIZES),
    "no yarn": Case("gpt_oss", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 15e4}}),
    "all experts": Case("gpt_oss", {**SIZES, "num_experts_per_tok": 6}),
    "own layer types": Case("gpt_oss", {**SIZES, "layer_types": ["full_attention"] * 3}, converts=False),
    "rounded yarn": Case("gpt_oss", {**SIZES, "rope_parameters": YARN}, converts=False),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("gpt_oss"), CASES)


@pytest.mark.parametrize(("name", "kind"), of_kind(CASES))
def test_logits_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    assert difference(root, name, kind, CASES[name]) < TOLERANCE
