"""quengine: runs quantized GGUF language models as they are stored, with the same numbers on CPU and CUDA.

    from quengine import LLM, SamplingParams

Importing this package loads neither torch nor numba; the names below are resolved on first use.
"""

from importlib import import_module

# As type checkers read it; importing `typing` would take most of this module's import time. Not the literal False:
# editors that follow values (jedi) would take the imports below for unreachable.
TYPE_CHECKING = not __name__
if TYPE_CHECKING:
    from typing import Any

    from quengine.async_llm import AsyncLLM
    from quengine.errors import CannotRunError, EngineError
    from quengine.evaluation.by_tensor import compare_tensors
    from quengine.evaluation.compare import compare
    from quengine.evaluation.imatrix import imatrix
    from quengine.evaluation.perplexity import perplexity
    from quengine.evaluation.suggested_mix import suggest_types
    from quengine.llm import LLM
    from quengine.models.convert.convert_folder import convert
    from quengine.models.lora.merge import merge
    from quengine.models.quantize.quantize_file import quantize
    from quengine.request.output import BatchProgress, Completion, TokenScore
    from quengine.request.sampling_params import LogitsProcessor, SamplingParams
    from quengine.scoring.choices import ChoiceScore
    from quengine.structured.constraint_spec import ConstraintSpec

__all__ = [
    "LLM",
    "AsyncLLM",
    "BatchProgress",
    "CannotRunError",
    "ChoiceScore",
    "Completion",
    "ConstraintSpec",
    "EngineError",
    "LogitsProcessor",
    "SamplingParams",
    "TokenScore",
    "__version__",
    "compare",
    "compare_tensors",
    "convert",
    "imatrix",
    "merge",
    "perplexity",
    "quantize",
    "suggest_types",
]

_HOME = {
    "LLM": "quengine.llm",
    "AsyncLLM": "quengine.async_llm",
    "SamplingParams": "quengine.request.sampling_params",
    "BatchProgress": "quengine.request.output",
    "ChoiceScore": "quengine.scoring.choices",
    "Completion": "quengine.request.output",
    "ConstraintSpec": "quengine.structured.constraint_spec",
    "LogitsProcessor": "quengine.request.sampling_params",
    "TokenScore": "quengine.request.output",
    "EngineError": "quengine.errors",
    "CannotRunError": "quengine.errors",
    "convert": "quengine.models.convert.convert_folder",
    "compare": "quengine.evaluation.compare",
    "compare_tensors": "quengine.evaluation.by_tensor",
    "imatrix": "quengine.evaluation.imatrix",
    "perplexity": "quengine.evaluation.perplexity",
    "merge": "quengine.models.lora.merge",
    "quantize": "quengine.models.quantize.quantize_file",
    "suggest_types": "quengine.evaluation.suggested_mix",
}


def __getattr__(name: str) -> "Any":
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("quengine")
        except PackageNotFoundError:  # run from its sources, as on a machine without a registry
            return "unknown"
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'quengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
