"""Choose launch geometries for one row of a mixture of experts by the time of a decode step, and keep them.

    python -m benchmarks.cuda.tune_experts [-m MODEL ...] [--write TABLE.json] [--depth 64]

As tune_matvec_chain does for Mistral-7B: the layers of a model run as the step runs them, attention included, and one
weight after the other takes the candidate with which the step is shortest. Prints the best ones of each, the times of a
layer's experts for 1, 2, 4 and 8 rows on the q-dot, and adds them to a launch table ("matvec", "experts").
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.cuda.cuda_timing import compile_ahead, graph_time, random_part
from benchmarks.cuda.tune_matvec_chain import layer_attention
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import QuantizedActivations, quantize_activations
from quengine.kernels.cuda.gemv.matvec import matvec
from quengine.kernels.cuda.gemv.matvec_norm import matvec_norm
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.experts import ExpertOperations
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.cuda.weights import launch_table
from quengine.kernels.cuda.weights.packed import PackedPart, PackedWeight
from quengine.kernels.moe.router import Router
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.block import Shape
from quengine.models.config import ModelConfig
from quengine.models.synthetic.presets import PRESETS, SyntheticModel
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
LAYERS = 6
WORKERS = 14

GLU = [
    [1, 8, 1, 80, True],
    [1, 8, 1, 64, True],
    [1, 4, 1, 72, True],
    [1, 4, 2, 80, True],
    [1, 2, 4, 0, False],
]
GLU += [
    [2, 4, 1, 72, True],
    [2, 4, 2, 0, False],
    [2, 2, 2, 0, False],
    [4, 2, 2, 0, False],
    [1, 16, 1, 64, True],
]
ADD = [
    [s, 1, k, a, r, e]
    for s in (8, 4, 2)
    for k in (1, 2, 4, 8, 16)
    for a, r, e in ((3, 0, False), (1, 64, True))
]
ADD += [[8, 2, 1, 2, 0, False], [4, 2, 2, 2, 0, False]]
NORM = [
    [1, 8, 1, 80, True],
    [1, 8, 2, 80, True],
    [1, 4, 2, 0, True],
    [1, 8, 2, 0, False],
    [1, 16, 1, 64, True],
]
ROWS = [[1, 8, 1, 80, True], [1, 4, 1, 80, True], [1, 4, 2, 0, True], [1, 8, 2, 0, False], [2, 4, 2, 0, True]]
"""ADD: first the experts that a program takes at a time; the rest, and the others: launch_table.Geometry."""


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, and what runs its attention."""

    qkv: PackedWeight
    output: PackedWeight
    output_bias: Tensor | None
    attend: Callable[[Tensor], object]
    router: Router
    gate_up: ExpertWeights
    down: ExpertWeights


Kind: TypeAlias = tuple[tuple[str, str, Shape], ...]
"""Name, type and shape of each matrix of a layer."""


def kinds_of_layers(spec: SyntheticModel) -> list[Kind]:
    """The layers of a model that differ in their types."""
    layers: dict[int, list[tuple[str, str, Shape]]] = {}
    for name, shape in required_tensors(spec.config()).items():
        if name.startswith("blk.") and name.endswith(".weight") and len(shape) > 1:
            _, layer, rest = name.split(".", 2)
            layers.setdefault(int(layer), []).append(
                (rest.removesuffix(".weight"), tensor_type(spec, name, shape), shape)
            )
    return list(dict.fromkeys(tuple(layer) for layer in layers.values()))


class Step:
    """A decode step, `LAYERS` layers of a kind long, without its output matrix."""

    def __init__(
        self, config: ModelConfig, kind: Kind, depth: int, rows: int = 1, layers: int = LAYERS
    ) -> None:
        assert config.experts is not None
        self.config, self.experts_config = config, config.experts
        self.pdl = torch.cuda.get_device_capability() >= (9, 0)
        room = MatmulWorkspace(0, "cuda")
        self.experts = ExpertOperations(torch.device("cuda"), lambda: room, self.pdl)
        self.out = QuantizedActivations.empty(1, config.head_count * config.head_dim, "cuda")
        self.layers = [self._layer(kind, depth) for _ in range(layers)]
        self.norm = RMSNorm(torch.ones(config.embedding_length, device="cuda"), 1e-5)
        self.hidden = torch.randn(rows, config.embedding_length, device="cuda")
        self.scratch = QuantizationScratch.empty(1 << 16, "cuda")

    def _layer(self, kind: Kind, depth: int) -> Layer:
        types = {name: (of_type, shape) for name, of_type, shape in kind}
        experts, hidden = self.experts_config, self.config.embedding_length

        def weight(*names: str) -> PackedWeight:
            runs: list[tuple[str, int]] = []
            for of_type, shape in (types[name] for name in names):
                before = runs.pop()[1] if runs and runs[-1][0] == of_type else 0
                runs.append((of_type, before + shape[0]))
            return PackedWeight(
                tuple(random_part(of_type, rows, types[names[0]][1][1]) for of_type, rows in runs)
            )

        def of_experts(name: str, rows: int, cols: int, paired: bool) -> ExpertWeights:
            part = random_part(types[name][0], experts.count * rows, cols)
            bias = torch.randn(experts.count, rows, device="cuda") if self.config.block.experts.bias else None
            return ExpertWeights((part,), experts.count, rows, paired, bias)

        qkv, output = weight("attn_q", "attn_k", "attn_v"), weight("attn_output")
        bias = torch.randn(hidden, device="cuda") if self.config.block.experts.bias else None
        router = Router(experts.router, torch.randn(experts.count, hidden, device="cuda"))
        ffn, config = experts.feed_forward_length, self.config
        attention = layer_attention(
            config.head_count, config.head_count_kv, config.head_dim, depth, self.out, self.pdl
        )
        return Layer(
            qkv, output, bias, attention, router,
            of_experts("ffn_gate_exps", 2 * ffn, hidden, True), of_experts("ffn_down_exps", hidden, ffn, False),
        )  # fmt: skip

    def run(self) -> None:
        x: RmsNormed | None = None
        for layer in self.layers:
            rows = quantize_activations(self.hidden) if x is None else x.rms_normed
            assert isinstance(rows, QuantizedActivations)
            layer.attend(matvec(rows, layer.qkv, pdl=self.pdl))
            after = matvec_norm(
                self.out,
                layer.output,
                self.hidden,
                self.norm.weight,
                1e-5,
                self.scratch,
                self.pdl,
                layer.output_bias,
            )
            x = self._feed_forward(layer, after)

    def _feed_forward(self, layer: Layer, x: RmsNormed) -> RmsNormed:
        assert isinstance(x.rms_normed, QuantizedActivations)
        routing = self.experts.route(x.hidden, self.norm, layer.router, None)
        activation = self.config.block.feed_forward.activation
        gated = self.experts.glu(x.rms_normed, routing, layer.gate_up, activation, False)
        both = self.experts.add(gated, routing, layer.down, x.hidden, self.norm, False)
        assert isinstance(both, RmsNormed)
        return both

    def run_experts(self) -> None:
        """The experts alone, of any number of rows."""
        x = RmsNormed(self.hidden, quantize_activations(self.hidden))
        for layer in self.layers:
            x = self._feed_forward(layer, x)

    def time(self, experts_alone: bool = False) -> float:
        """Microseconds a layer."""
        run = self.run_experts if experts_alone else self.run
        return min(graph_time([run]) for _ in range(2)) / len(self.layers)


def candidates(step: Step) -> dict[tuple[str, str], list[list[int]]]:
    """By the table and key of each weight: the geometries to try."""
    layer, used = step.layers[0], step.experts_config.router.used
    gate_up, down = layer.gate_up.parts[0], layer.down.parts[0]
    assert isinstance(gate_up, PackedPart) and isinstance(down, PackedPart)
    qkv, output = layer.qkv.parts, layer.output.parts
    assert all(isinstance(part, PackedPart) for part in (*qkv, *output))
    return {
        ("experts", launch_table.experts_key(gate_up, "glu", layer.gate_up.expert_tiles, used)): [
            g for g in GLU if g[1] <= gate_up.chunks <= 8 * g[1]
        ],
        ("experts", launch_table.experts_key(down, "add", layer.down.expert_tiles, used)): [
            g
            for g in ADD
            if used / 2 <= g[0] <= used and 8 <= g[0] * g[2] <= 32 and g[2] <= down.chunks <= 8 * g[2]
        ],
        ("matvec", launch_table.matvec_key(output, "norm")): NORM,  # type: ignore[arg-type]
        ("matvec", launch_table.matvec_key(qkv, "rows")): ROWS,  # type: ignore[arg-type]
    }


def tune(name: str, depth: int) -> dict[str, dict[str, list[int]]]:
    config = PRESETS[name].config()
    best: dict[str, dict[str, list[int]]] = {}
    for kind in kinds_of_layers(PRESETS[name]):
        step = Step(config, kind, depth)
        print(f"{name} ({_types(kind)}): {step.time():.2f} us a layer before", flush=True)
        _tune_step(step, best)
        print(f"{name}: {step.time():.2f} us a layer, {step.time(True):.2f} of it experts", flush=True)
        for rows in (2, 4, 8):
            of_rows = Step(config, kind, depth, rows)
            print(f"{name}, {rows} rows on the q-dot: {of_rows.time(True):.2f} us", flush=True)
            del of_rows
    return best


def _types(kind: Kind) -> str:
    return " ".join(of_type for _, of_type, _ in kind)


def _tune_step(step: Step, best: dict[str, dict[str, list[int]]]) -> None:
    table = launch_table._table().setdefault(launch_table.table_key(), {})
    for (kind, key), tried in candidates(step).items():
        entries = table.setdefault(kind, {})
        times: list[tuple[float, list[int] | None]] = [(step.time(), entries.get(key))]
        for geometry in tried:
            entries[key] = geometry
            try:
                times.append((step.time(), geometry))
            except Exception as error:  # too many registers or warps for the device: no candidate
                print(f"{key} {geometry}: {str(error)[:80]}", flush=True)
        times.sort(key=lambda found: found[0])
        chosen = times[0][1]
        if chosen is None:
            entries.pop(key)
        else:
            best.setdefault(kind, {})[key] = entries[key] = chosen
        shown = ", ".join(
            f"{time:.2f} {'as it is' if found is None else '/'.join(str(int(v)) for v in found)}"
            for time, found in times[:6]
        )
        print(f"{key}: {shown}; worst {times[-1][0]:.2f}", flush=True)


def compile_share(name: str, worker: int) -> None:
    for kind in kinds_of_layers(PRESETS[name]):
        step = Step(PRESETS[name].config(), kind, 1, layers=1)
        table = launch_table._table().setdefault(launch_table.table_key(), {})
        for (kind_of, key), tried in candidates(step).items():
            for geometry in tried[worker::WORKERS]:
                table.setdefault(kind_of, {})[key] = geometry
                try:
                    step.run()
                except Exception:  # said where it is timed
                    continue
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--write", type=Path, metavar="TABLE", help="a table to add the geometries to")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        for name in arguments.model:
            compile_share(name, arguments.compile)
        return
    compile_ahead("cuda.tune_experts", ["-m", *arguments.model], [str(i) for i in range(WORKERS)])
    found = [tune(name, arguments.depth) for name in arguments.model]
    print(json.dumps(found))
    if arguments.write:
        table = json.loads(arguments.write.read_text())
        for best in found:
            for kind, entries in best.items():
                table.setdefault(launch_table.table_key(), {}).setdefault(kind, {}).update(entries)
        arguments.write.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
