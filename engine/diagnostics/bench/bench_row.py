"""One row of a benchmark: what was timed, on which model, and every number that was measured."""

from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

from quengine.config import Split
from quengine.diagnostics.bench.bench_plan import BenchTest
from quengine.diagnostics.bench.profile import Profile
from quengine.models.blocks.experts import ExpertConfig
from quengine.request.output import DraftCounts


@dataclass(frozen=True)
class ModelFacts:
    """A model in numbers.

    nbytes: size of all tensors. params: number of weights. types: the types in which they are stored. active_params,
    active_bytes, experts: for a mixture of experts, the weights that compute a token, their bytes, and the experts.
    """

    name: str
    path: str
    nbytes: int
    params: int
    types: str
    active_params: int | None = None
    active_bytes: int | None = None
    experts: ExpertConfig | None = None


@dataclass(frozen=True)
class BenchRow:
    """One test on one model with one thread count, of one sequence or of `batch` at once.

    seconds: the time of each repetition.
    bytes_per_token: bytes of weights, and of the cache on average, that are read for one generated token; 0 where a
        prompt is part of the test (the tokens of a chunk share one pass over the weights), and with drafts of several
        sequences, whose number differs from step to step.
    bandwidth: bytes per second that the device's memory can read.
    operations: floating-point operations of a single prompt; 0 where tokens are generated.
    matrix_rate: operations per second of the device's matrix units; None on the CPU.
    peak_bytes: the most memory of the device (of the process on the CPU) since the model was loaded, without the part
        of the cache that only other rows need. held_bytes: weights and cache, a part of it.
    kernels_per_step: kernels in the captured decode step; None without one.
    drafts: counts of drafted and accepted tokens; None without drafts.
    host_layers: layers whose experts are in host memory beside a CUDA device. host_bytes: the size of these experts.
    placement: a line that describes this, where it was requested.
    ranks: devices that share the model; bytes, operations and memory are then those of one. split: how they share it.
    """

    model: ModelFacts
    test: BenchTest
    device: str
    backend: str
    threads: int
    seconds: tuple[float, ...]
    bytes_per_token: int
    bandwidth: float
    load_s: float
    peak_bytes: int
    held_bytes: int
    operations: int = 0
    matrix_rate: float | None = None
    kernels_per_step: int | None = None
    profile: tuple[Profile, ...] = ()
    batch: int = 1
    cache_type: str = "f16"
    deterministic: bool = False
    drafts: DraftCounts | None = None
    host_layers: int = 0
    host_bytes: int = 0
    placement: str = ""
    ranks: int = 1
    split: Split = "tensor"

    @property
    def name(self) -> str:
        """The test, with the number of sequences where there are several."""
        return self.test.name + (f" x {self.batch}" if self.batch > 1 else "")

    @property
    def samples(self) -> tuple[float, ...]:
        """Tokens per second of each repetition, of all sequences together."""
        return tuple(self.batch * (self.test.prompt + self.test.generate) / s for s in self.seconds)

    @property
    def tok_s(self) -> float:
        return mean(self.samples)

    @property
    def deviation(self) -> float:
        """The samples' standard deviation; 0 for one sample."""
        return stdev(self.samples) if len(self.seconds) > 1 else 0.0

    @property
    def gb_s(self) -> float | None:
        """Gigabytes (1e9 bytes) read per second; None where memory does not limit the test."""
        return self.bytes_per_token * self.tok_s / 1e9 if self.bytes_per_token else None

    @property
    def step_rows(self) -> float:
        """Average rows of a decode step: one for each sequence, and one for each token that was drafted for it."""
        if self.drafts is None:
            return self.batch
        steps = self.batch * len(self.seconds) * self.test.generate - self.drafts.accepted
        return self.batch * (1 + self.drafts.drafted / max(1, steps))

    @property
    def bandwidth_percent(self) -> float | None:
        """The percentage of the memory bandwidth that was used; None where it does not limit the test, or experts are
        in host memory."""
        if self.gb_s is None or self.host_bytes:
            return None
        return 100 * self.gb_s / (self.bandwidth / 1e9)

    @property
    def matrix_percent(self) -> float | None:
        """The percentage of the matrix rate that was used; None where it does not limit the test, or was not
        measured."""
        if not self.operations or self.matrix_rate is None:
            return None
        return 100 * self.operations / self.test.prompt * self.tok_s / self.matrix_rate

    @property
    def peak_over_bytes(self) -> int:
        """Memory at the peak beside weights and cache."""
        return self.peak_bytes - self.held_bytes

    def as_dict(self, machine: dict[str, Any] | None = None) -> dict[str, Any]:
        """All numbers as one flat object for JSON, with the fields of `machine`."""
        fields: dict[str, Any] = {
            "model": self.model.name,
            "model_path": self.model.path,
            "model_bytes": self.model.nbytes,
            "model_params": self.model.params,
            "model_types": self.model.types,
            **self._experts(),
            "device": self.device,
            "tensor_parallel": self.ranks,
            "split": self.split,
            "backend": self.backend,
            "threads": self.threads,
            "cache_type": self.cache_type,
            "deterministic": self.deterministic,
            "batch": self.batch,
            "test": self.test.name,
            "n_prompt": self.test.prompt,
            "n_gen": self.test.generate,
            "n_depth": self.test.depth,
            "tok_s": self.tok_s,
            "tok_s_stddev": self.deviation,
            "samples_tok_s": list(self.samples),
            "samples_s": list(self.seconds),
            "bytes_per_token": self.bytes_per_token,
            "gb_s": self.gb_s,
            "bandwidth_gb_s": self.bandwidth / 1e9,
            "bandwidth_percent": self.bandwidth_percent,
            "load_s": self.load_s,
            "peak_bytes": self.peak_bytes,
            "peak_over_weights_and_cache_bytes": self.peak_over_bytes,
            "operations": self.operations,
            "matrix_tflops": None if self.matrix_rate is None else self.matrix_rate / 1e12,
            "matrix_percent": self.matrix_percent,
            "kernels_per_step": self.kernels_per_step,
        }
        if self.drafts is not None:
            fields |= {
                "draft_steps": self.drafts.steps,
                "drafted_tokens": self.drafts.drafted,
                "accepted_tokens": self.drafts.accepted,
                "accept_rate": self.drafts.accept_rate,
                "accept_length": self.drafts.accept_length,
            }
        if self.profile:
            fields["profile"] = [asdict(profile) for profile in self.profile]
        return fields if machine is None else {**fields, **machine}

    def _experts(self) -> dict[str, Any]:
        """The fields of a mixture of experts, each None for other models; `experts_read`: expected experts read by a
        layer in a step of the test."""
        model, experts = self.model, self.model.experts
        return {
            "model_active_params": model.active_params,
            "model_active_bytes": model.active_bytes,
            "experts": experts and experts.count,
            "experts_used": experts and experts.router.used,
            "experts_read": experts.expected(self.step_rows) if experts and not self.test.prompt else None,
            "cpu_moe_layers": experts and self.host_layers,
            "cpu_moe_bytes": experts and self.host_bytes,
        }
