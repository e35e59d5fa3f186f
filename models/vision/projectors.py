"""The table of projectors, and the errors for those that are not supported."""

from quengine.errors import EngineError
from quengine.models.vision.gemma3 import GEMMA3
from quengine.models.vision.gemma4uv import GEMMA4UV
from quengine.models.vision.gemma4v import GEMMA4V
from quengine.models.vision.glm4v import GLM4V
from quengine.models.vision.idefics3 import IDEFICS3
from quengine.models.vision.internvl import INTERNVL
from quengine.models.vision.lfm2 import LFM2
from quengine.models.vision.pixtral import PIXTRAL
from quengine.models.vision.projector import Projector
from quengine.models.vision.qwen3vl import QWEN3VL
from quengine.models.vision.qwen25vl import QWEN25VL

_ALL = (IDEFICS3, PIXTRAL, GEMMA3, GEMMA4V, GEMMA4UV, QWEN3VL, QWEN25VL, LFM2, INTERNVL, GLM4V)
PROJECTORS: dict[str, Projector] = {each.name: each for each in _ALL}
OF_MODEL_TYPE: dict[str, Projector] = {kind: each for each in PROJECTORS.values() for kind in each.hf_types}


def projector_named(name: str, where: str) -> Projector:
    """The projector that GGUF calls `name`. Raises EngineError."""
    if name not in PROJECTORS:
        known = ", ".join(sorted(PROJECTORS))
        raise EngineError(f"{where}: projector {name[:80]!r} is not supported; supported are {known}")
    return PROJECTORS[name]
