"""Loading a model for a command, with a line about it for who watches."""

from typing import TYPE_CHECKING

from quengine.cli.options import Drafts
from quengine.cli.progress import ProgressLine
from quengine.kernels.kv.cache_types import CacheType
from quengine.platform import collector

if TYPE_CHECKING:
    from quengine.llm import LLM


def load_llm(
    model: str,
    device: str,
    ctx_size: int | None,
    threads: int | None,
    backend: str,
    cache_type: CacheType,
    *,
    drafts: Drafts,
    deterministic: bool,
    mmap: bool,
    reuse_prefix: bool = False,
) -> "LLM":
    """The model as the options of `generate` and `chat` ask for it. Raises what `LLM` does."""
    from quengine.llm import LLM

    progress = ProgressLine()
    llm = LLM(
        model,
        device,
        ctx_size,
        threads,
        backend,
        reuse_prefix=reuse_prefix,
        cache_type=cache_type,
        deterministic=deterministic,
        mmap=mmap,
        draft_model=drafts.draft_model,
        draft_ngram=drafts.draft_ngram,
        draft_tokens=drafts.draft_tokens,
        progress=progress,
    )
    progress.clear()
    collector.working()
    return llm
