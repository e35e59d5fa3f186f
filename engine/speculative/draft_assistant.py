"""Drafts by an assistant, a model that attends to the target's keys and values (models/assistant_decoder.py).

It has no cache of its own, so it computes nothing for prompts and accepted tokens. A draft begins with a hidden row
that the target's steps keep: that of the position before the newest token.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import torch

from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.model_runner import ModelRunner
from quengine.models.assistant_decoder import AssistantDecoder
from quengine.platform.ranges import ProfilerRange
from quengine.request.sampling_params import SamplingParams
from quengine.request.sequence import Sequence
from quengine.sampler import Sampler
from quengine.scheduler import PENDING
from quengine.speculative.draft_model import DraftModel, HostDraftSteps, StepsOnDevice, sampled


class AssistantDrafts(DraftModel):
    """A `DraftModel` without a cache of its own. runner: the target's runner, which keeps hidden rows."""

    def __init__(
        self, decoder: AssistantDecoder, runner: ModelRunner, on_device: StepsOnDevice | None = None
    ) -> None:
        super().__init__(runner, HostDraftSteps(runner), on_device)
        self._decoder = decoder
        self._context = min(runner.cache.ctx_size, decoder.config.context_length)
        self._samplers: WeakKeyDictionary[Sequence, Sampler] = WeakKeyDictionary()

    def warm_up(self, params: SamplingParams | None) -> None:
        """Captures steps that draft on the device. Drafts for the host are computed eagerly."""
        self._warm_up_on_device(params)

    @property
    def bytes_per_token(self) -> int:
        return self._decoder.bytes_per_step

    @property
    def cache_bytes(self) -> int:
        return 0

    def room(self, sequence: Sequence) -> int:
        return self._context - len(sequence.token_ids)

    def follow_all(self, ends: Mapping[Sequence, int]) -> None:
        """Does nothing: the target has computed all that the assistant reads."""

    def fits_device(self, sequence: Sequence) -> bool:
        """As DraftModel: if a position precedes the newest token, and the assistant's context does not end within steps
        that are launched ahead."""
        if self._on_device is None:
            return False
        ahead = PENDING * (1 + self._on_device.most_drafted(1))
        return 1 < len(sequence.token_ids) < self._context - ahead

    def begin_on_device(self, ends: Mapping[Sequence, int]) -> None:
        """Does nothing, as `follow_all`."""

    def computed(self, sequence: Sequence, count: int) -> None:
        """Does nothing, as `follow_all`."""

    @torch.no_grad()
    def draft(self, counts: Mapping[Sequence, int]) -> dict[Sequence, Seq[int]]:
        drafting = [each for each in counts if len(each.token_ids) > 1]
        drafts: dict[Sequence, Seq[int]] = {each: [] for each in counts}
        histories = {each: list(each.token_ids) for each in drafting}
        for each in drafting:
            self._sampler_of(each).reset()  # it has seen drafted tokens that were rejected
        with ProfilerRange("draft steps"):
            hidden = self._first_rows(drafting) if drafting else None
            while drafting:
                batch = decode_batch(
                    [histories[each][-1] for each in drafting],
                    [len(each.token_ids) - 2 for each in drafting],
                    [each.block_tables for each in drafting],
                    self._decoder.backend.device,
                )
                assert hidden is not None
                logits, hidden = self._decoder.step(batch, hidden, self._runner.cache.layers)
                going_on = []
                for row, (each, of_row) in enumerate(zip(drafting, logits.float().cpu(), strict=True)):
                    if (token := sampled(self._samplers[each], of_row, histories[each])) is not None:
                        histories[each].append(token)
                        drafts[each] = histories[each][len(each.token_ids) :]
                        if len(drafts[each]) < counts[each]:
                            going_on.append(row)
                drafting, hidden = [drafting[row] for row in going_on], hidden[going_on]
        return drafts

    def _first_rows(self, drafting: Seq[Sequence]) -> torch.Tensor:
        """The target's hidden rows of the positions before each sequence's newest token: fp32 [S, width]."""
        kept = self._runner.cache.hidden
        assert kept is not None
        positions = [len(each.token_ids) - 2 for each in drafting]
        places = [
            each.block_tables[0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for each, position in zip(drafting, positions, strict=True)
        ]
        return kept[torch.tensor(places, device=kept.device)].float()

    def _sampler_of(self, sequence: Sequence) -> Sampler:
        sampler = self._samplers.get(sequence)
        if sampler is None or sampler.stream != sequence.sampler.stream:
            sampler = self._samplers[sequence] = self._sampler(sequence)
        return sampler
