"""Locating a fault in layers that have more operations than most, or fewer: latent attention, inputs beside the stream,
layers of a feed-forward alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from quengine import LLM
from quengine.diagnostics.harness import opened
from quengine.diagnostics.parity.parity import compare_sides
from quengine.diagnostics.parity.parity_locate import CAPTURED, Location, locate
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.diagnostics.parity.parity_workload import Workload
from quengine.models.architectures import layers_of
from quengine.models.layers import LayerTensors
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic

IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(20)]
WORKLOAD = Workload([IDS], [], 1, 1, 32)
INPUTS = (
    *("norm+qkv", "attention", "output+residual", "norm+glu", "down+residual"),
    *("input+glu", "input+residual"),
)


def quiet(_: str) -> None:
    pass


def written(preset: str, folder: Path) -> Path:
    model = synthetic_preset(preset)
    assert model is not None
    small = replace(model, vocab_size=300, context_length=128, embedding_length=256)
    if small.experts:
        small = replace(small, experts=8, experts_used=2)
    return write_synthetic(folder / "model.gguf", small)


def located(path: Path) -> dict[str, Location]:
    """The reference against the CPU's kernels, by phase."""
    with LLM(path, "cpu", 32, 1, "reference") as exact, LLM(path, "cpu", 32, 1) as llm:
        a, b = LLMSide("reference", exact), LLMSide("cpu", llm)
        found = locate(a, b, compare_sides(a, b, WORKLOAD, quiet), quiet)
    return {location.phase: location for location in found}


@pytest.mark.parametrize("preset", ["deepseek2-tiny", "gemma-4-e-tiny", "nemotron-h-tiny"])
def test_every_operation_is_within_its_budget(preset: str, tmp_path: Path) -> None:
    path = written(preset, tmp_path)
    found = located(path)
    assert {phase: location.first for phase, location in found.items()} == {"prefill": None, "decode": None}
    operations = [(o.operation, o.layer) for o in found["decode"].operations]
    assert operations[-1][0] == CAPTURED
    if preset == "gemma-4-e-tiny":
        layers = [(name, layer) for layer in range(6) for name in INPUTS]
        assert operations[1:-2] == [("layer inputs", None), ("layer inputs", None), *layers]
        attentions = [o for o in found["decode"].operations if o.operation == "attention"]
        assert [o.cached is None for o in attentions] == [False] * 3 + [True] * 3
    else:
        with opened(path) as checkpoint:
            mixers = [n for n, of in enumerate(layers_of(checkpoint.config)) if of.mixer is not None]
        assert [layer for name, layer in operations if name == "attention"] == mixers
        assert all(o.cached is not None for o in found["decode"].operations if o.operation == "attention")


def test_wrong_inputs_of_a_layer_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, take = written("gemma-4-e-tiny", tmp_path), LayerTensors.weight

    def wrong(self: LayerTensors, *names: str) -> object:
        """The gate of the second layer stands in for that of the fifth, on the CPU alone."""
        if names == ("inp_gate",) and self.layer == 4 and self.backend.name == "cpu":
            return self.backend.weight([self.tensors["blk.1.inp_gate.weight"]])
        return take(self, *names)

    monkeypatch.setattr(LayerTensors, "weight", wrong)
    firsts = [location.first for location in located(path).values()]
    assert [first and first.place for first in firsts] == ["layer 4, input+glu"] * 2
