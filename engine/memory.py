"""How much memory a run needs, and how long a context fits. Refuses before anything is allocated."""

from quengine.errors import CannotRunError, EngineError
from quengine.models.config import ModelConfig

_WORKSPACE = 256 * 2**20
"""Set aside for activations, dequantized tiles and the program itself."""

_STEP = 256


def gib(nbytes: int) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"


def choose_context(config: ModelConfig, asked: int | None, weight_bytes: int, free: int, where: str) -> int:
    """Positions of the cache: what was asked for, or the model's own context cut to what fits.

    Args:
        asked: the user's context size, or None.
        weight_bytes: what the weights take on the same memory.
        free: bytes available there, before the weights are loaded.
        where: the name of that memory, for the message.

    Raises:
        EngineError: more positions were asked for than the model was made for.
        CannotRunError: the weights, or the weights and the cache asked for, do not fit.
    """
    if asked is not None and asked > config.context_length:
        raise EngineError(
            f"context of {asked} tokens is more than the {config.context_length} that {config.architecture} model "
            f"was made for; use -c {config.context_length} or less"
        )
    room = free - weight_bytes - _WORKSPACE
    per_step = config.kv_cache_bytes(_STEP)
    fitting = max(0, room) // per_step * _STEP
    wanted = config.context_length if asked is None else asked
    if fitting >= wanted:
        return wanted
    if asked is None and fitting >= _STEP:
        return fitting
    need = weight_bytes + _WORKSPACE + config.kv_cache_bytes(wanted if asked is not None else _STEP)
    advice = f"try -c {fitting}" if fitting >= _STEP else "use a smaller model or a smaller quantization"
    raise CannotRunError(
        f"not enough memory on {where}: needs {gib(need)} (weights {gib(weight_bytes)}, cache "
        f"{gib(config.kv_cache_bytes(wanted))} for {wanted} tokens), free {gib(free)}; {advice}"
    )
