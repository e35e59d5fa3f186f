"""What a server can load: a model's name, where it is, and its options."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.serve.models.model_folder import parts_of
from quengine.serve.settings import ServerSettings


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded.

    Attributes:
        settings: the server's, with the names, sampling defaults and template of this model; the first of its
            `model_names` is the model's.
        config: how the engine runs it.
        model: as `LLM` takes it.
        path, nbytes: the file or folder of its weights, and their bytes; None and 0 where they are not known.
        at_start: it is loaded when the server starts.
    """

    settings: ServerSettings
    config: EngineConfig = field(default_factory=EngineConfig)
    model: str = ""
    path: Path | None = None
    nbytes: int = 0
    at_start: bool = False

    @property
    def name(self) -> str:
        return self.settings.model_names[0]


def check_names(specs: Iterable[ModelSpec]) -> None:
    """Raises EngineError where two models have a name in common."""
    owners: dict[str, str] = {}
    for spec in specs:
        for name in spec.settings.model_names:
            if name in owners:
                raise EngineError(f"two models are called {name}: {owners[name]} and {spec.model}")
            owners[name] = spec.model


def check_header(spec: ModelSpec) -> None:
    """Raises EngineError for GGUF files whose headers are not those of a model, before another model leaves for it."""
    if spec.path is not None and not spec.path.is_dir():
        from quengine.models.gguf.header import read_shard

        for part in parts_of(spec.path):
            read_shard(part)


def weight_bytes(path: Path) -> int:
    """Bytes of a model's files: of a folder's weights, of all parts of a split GGUF. 0 where they cannot be read."""
    try:
        if path.is_dir():
            return sum(each.stat().st_size for each in path.glob("*.safetensors"))
        return sum(part.stat().st_size for part in parts_of(path))
    except OSError:
        return 0
