"""Opens a draft model's checkpoint, and checks that its vocabulary is the target's."""

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.architectures.gemma4_assistant import sources
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.hub.hub import resolve_model
from quengine.speculative.draft_length import draft_vocab


def open_draft(config: EngineConfig, target: Checkpoint) -> Checkpoint | None:
    """The draft model's checkpoint, or the model's own layer that drafts; None if the configuration names none.

    Raises:
        EngineError: there is no such model or layer, its file is wrong, or its vocabulary is not the target's.
    """
    if config.draft_mtp:
        return DraftLayer(target, draft_vocab(config))
    if config.draft_model is None:
        return None
    try:
        path = resolve_model(str(config.draft_model))
        eagle = open_eagle(path, target)
        draft = open_checkpoint(path) if eagle is None else eagle
    except EngineError as error:
        raise type(error)(f"draft model: {error}") from None
    if eagle is not None:
        return eagle
    if draft.config.target_width:
        sources(draft.config, target.config)
    if draft.config.recurrent_layers:
        raise EngineError(
            f"the draft model {draft.path.name} ({draft.config.architecture}) keeps a state, which a draft that is not "
            "accepted would spoil; use one with attention in every layer"
        )
    check_same_vocabulary(target, draft)
    return draft


def check_generates(checkpoint: Checkpoint) -> None:
    """Raises EngineError for a model that only drafts for another one."""
    if checkpoint.config.target_width:
        raise EngineError(
            f"{checkpoint.path.name} is a {checkpoint.config.architecture} model, which drafts tokens for another one: "
            "give that model, and this as --draft-model"
        )


def check_shared(config: EngineConfig, draft: Checkpoint | None) -> None:
    """Raises EngineError where several devices share a model whose hidden rows a draft needs."""
    reads = draft is not None and (draft.config.target_width or draft.config.eagle is not None)
    if draft is not None and reads and config.ranks > 1:
        raise EngineError(
            f"the draft model {draft.path.name} ({draft.config.architecture}): not implemented for a model that "
            f"{config.ranks} devices share; leave out --draft-model, or use one device (--tensor-parallel 1)"
        )
    if config.draft_mtp is not None and config.draft_mtp > 0 and config.ranks > 1:
        raise EngineError(
            f"draft_mtp {config.draft_mtp}: not implemented for a model that {config.ranks} devices share; leave out "
            "--draft-mtp, or use one device (--tensor-parallel 1)"
        )


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises EngineError if the vocabularies of target and draft model differ.

    Logits may be padded to different lengths; the tokens themselves must agree in number, bytes and kind.
    """
    ours, theirs = target.tokenizer(), draft.tokenizer()
    pair = f"the draft model {draft.path.name} has another vocabulary than {target.path.name}"
    if ours.vocab_size != theirs.vocab_size:
        raise EngineError(
            f"{pair}: {theirs.vocab_size} tokens against {ours.vocab_size}; use one of the same family"
        )
    for token in range(ours.vocab_size):
        mine, other = ours.token_bytes(token), theirs.token_bytes(token)
        if mine != other or ours.is_control(token) != theirs.is_control(token):
            raise EngineError(
                f"{pair}: token {token} is {_shown(other, theirs.is_control(token))} there and "
                f"{_shown(mine, ours.is_control(token))} here; use one of the same family"
            )


def _shown(token: bytes, control: bool) -> str:
    return repr(token.decode(errors="backslashreplace")) + (" (a control token)" if control else "")
