"""Drafts by the model's own layer (MTP) where no option requests or excludes them: whether its steps can draft by
themselves, and whether memory has room for them."""

from dataclasses import replace

import torch

from quengine.block_pool import CachePool
from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.loading.machine import may_draft_on_device, states_can_wait
from quengine.loading.placement import choose_cache
from quengine.memory import USABLE_CONTEXT
from quengine.models.checkpoint import Checkpoint
from quengine.models.draft_checkpoint import DraftLayer
from quengine.platform.host_experts import ExpertPlacement
from quengine.speculative.draft_length import AUTOMATIC_MTP, draft_vocab


def settle_drafts(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, takes_images: bool
) -> tuple[EngineConfig, DraftLayer | None]:
    """`config` with a number for `draft_mtp` where it is None, and the layer that drafts then, if any.

    Raises EngineError for options of such drafts where there are none.
    """
    if config.draft_mtp is not None:
        return config, None
    problem = _why_not(config, checkpoint, device, takes_images)
    if problem is None:
        settled = replace(config, draft_mtp=AUTOMATIC_MTP, draft_on_device=True)
        try:
            return settled, DraftLayer(checkpoint, draft_vocab(config))
        except EngineError as error:  # the model itself runs without the layer
            problem = str(error)
    if config.draft_vocab is not None:
        raise EngineError(
            f"draft_vocab {config.draft_vocab}: the model's own layer drafts from these, and by default it does not "
            f"here: {problem}; request its drafts (--draft-mtp)"
        )
    return replace(config, draft_mtp=0), None


def _why_not(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, takes_images: bool
) -> str | None:
    """Why steps do not draft by themselves; None: they can."""
    shape = checkpoint.config
    if not shape.draft_layers:
        return f"{checkpoint.path.name} has no layer that drafts tokens (MTP)"
    if config.speculates:
        return "other drafts are requested"
    if device.type != "cuda" or config.backend != "auto":
        return "the model runs on no CUDA device"
    if config.ranks > 1:
        return f"{config.ranks} devices share the model"
    if config.places_experts:
        return "experts are in host memory"
    if takes_images and shape.rope_axes:
        return "rows of images have three positions"
    if not may_draft_on_device(config):
        return "the model has LoRA adapters" if config.lora else "steps are to be deterministic"
    if not states_can_wait(shape):
        return "states of the model do not wait for what is accepted"
    return None


def fit_drafts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    device: torch.device,
    free: int,
    experts: ExpertPlacement,
) -> tuple[EngineConfig, Checkpoint | None, int, list[CachePool], list[str]]:
    """Calls `choose_cache`, and gives up drafts that no option requests where memory is short. It is short where
    weights and the requested context would not fit beside the drafts, or only a context below USABLE_CONTEXT.

    Returns the resulting configuration and draft, the context, the pools, and lines for the user.
    """
    rest = device, free, experts
    if not config.draft_on_device or draft is None:
        return config, draft, *choose_cache(config, checkpoint, draft, *rest), []
    least = config.ctx_size or min(USABLE_CONTEXT, checkpoint.config.context_length)
    try:
        ctx_size, pools = choose_cache(config, checkpoint, draft, *rest)
    except CannotRunError:
        ctx_size, pools = 0, []
    if ctx_size >= least:
        return config, draft, ctx_size, pools, []
    alone = replace(config, draft_mtp=0, draft_on_device=False)
    note = f"no drafts by the model's own layer: {device} has no room for it beside the model and its context"
    return alone, None, *choose_cache(alone, checkpoint, None, *rest), [note]
