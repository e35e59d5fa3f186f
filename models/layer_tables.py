"""Tables shared by layers: rotary tables and causal masks, made once for all layers of a kind."""

from typing import Any

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.moe.host_experts import PlacedExperts
from quengine.kernels.rope import rope_table
from quengine.models.blocks.attention import Attention
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.config import ModelConfig
from quengine.models.rotation import Rotation

_STEP_ROWS = 4096
"""Least number of image rows of a step that the rotary tables have room for; a longer chunk has room for its own."""


class LayerTables:
    """Tables shared by layers, see the module docstring.

    Args:
        config: the model's shape.
        device: device of the tables.
        ctx_size: number of positions of the rotary tables.
        chunk_size: maximum number of rows of the causal mask.
        host: computes the experts of the first `host.layers` layers; None: the backend computes all.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        ctx_size: int,
        chunk_size: int,
        host: PlacedExperts | None = None,
    ) -> None:
        self._device, self._ctx_size, self._chunk_size = device, ctx_size, chunk_size
        self._host = host
        self._groups = {layer: n for n, group in enumerate(config.cache_groups) for layer in group.layers}
        self._groups |= {
            layer: self._groups[source]
            for layer in config.held_layers
            if (source := config.kv_source(layer)) != layer
        }
        self._masks: dict[int | None, Tensor] = {}
        self._rotations: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._chunk = config.attention_chunk if config.attention_chunk < ctx_size else 0
        self._turned = max(chunk_size, _STEP_ROWS) if config.rope_axes else 0
        self._query_scales: dict[tuple[float, int, int], Tensor] = {}

    def cache_group(self, layer: int) -> int:
        """The index of a layer's cache group (ModelConfig.cache_groups), whose block tables it uses."""
        return self._groups[layer]

    def host_experts(self, layer: int) -> Any:
        """The operations of a layer's experts in host memory; None if the backend computes them."""
        if self._host is None or layer >= self._host.layers:
            return None
        return self._host.of_layer(layer)

    def attention(self, layer: int, declared: Attention, eps: float) -> AttentionSpec:
        """The constants of a layer's attention, without the layer's own tensors. `eps`: that of its norms."""
        cos, sin = self._rotation(declared.rotation)
        window, chunk = (None, self._chunk) if declared.chunked else (declared.window, 0)
        return AttentionSpec(
            heads=declared.heads,
            kv_heads=declared.kv_heads,
            head_dim=declared.head_dim,
            scale=declared.scale,
            rope_layout=declared.rotation.layout,
            query_scale=self._query_scale(declared.temperature),
            eps=eps,
            cache_group=self.cache_group(layer),
            window=window,
            chunk=chunk,
            v_norm=declared.form.v_norm,
            softcap=declared.softcap,
            shared=declared.shared,
            mask_band=self._mask(window),
            images_both_ways=declared.form.images_both_ways == "all" or declared.window is not None,
            cos=cos,
            sin=sin,
        )

    def latent(self, layer: int, declared: LatentAttention) -> LatentSpec:
        """The constants of a layer's latent attention, without the layer's own tensors."""
        cos, sin = self._rotation(declared.rotation)
        sizes = declared.sizes
        return LatentSpec(
            heads=declared.heads,
            rank=sizes.rank,
            plain=sizes.plain,
            rotated=sizes.rotated,
            values=sizes.values,
            scale=declared.scale,
            rope_layout=declared.rotation.layout,
            cos=cos,
            sin=sin,
            mask_band=self._mask(None),
            norm=cos,
            eps=sizes.eps,
            absorb=None,
            expand=None,
            query_scale=self._query_scale(declared.temperature),
            cache_group=self.cache_group(layer),
        )

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            rows = min(self._chunk_size, self._ctx_size)
            self._masks[window] = causal_mask_band(rows, self._ctx_size, window, self._device)
        return self._masks[window]

    def _rotation(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 [ctx_size, dim / 2]; ones and zeros, which change no bit, where nothing rotates. If
        image rows have three positions, room for the rows of a step follows, which `turn_images` fills."""
        if rotation not in self._rotations:
            if rotation.turns:
                cos, sin = rope_table(
                    rotation.spec(self._ctx_size), self._ctx_size + self._turned, self._device
                )
            else:
                cos = torch.ones(self._ctx_size, rotation.dim // 2, device=self._device)
                sin = torch.zeros_like(cos)
            self._rotations[rotation] = cos, sin
        return self._rotations[rotation]

    def turn_images(self, places: Tensor) -> None:
        """Writes the angles of image rows, whose three positions are `places`, int64 [n, 3] on the device, behind the
        tables: those of row i to row ctx_size + i. Raises EngineError if there is no room for them."""
        if len(places) > self._turned:
            raise EngineError(
                f"{len(places)} image rows in a step, and the rotary tables have room for {self._turned}"
            )
        for rotation, (cos, sin) in self._rotations.items():
            if rotation.axes and rotation.turns:
                axes = torch.tensor(rotation.axes, device=places.device)
                at, pair = places[:, axes], torch.arange(len(axes), device=places.device)
                for table in (cos, sin):
                    table[self._ctx_size : self._ctx_size + len(places)] = table[at, pair]

    def _query_scale(self, temperature: tuple[float, int, int] | None) -> Tensor | None:
        """The factor of the query at each position, fp32 [ctx_size] (Ministral 3, Llama 4), or None."""
        if temperature is not None and temperature not in self._query_scales:
            scale, length, offset = temperature
            steps = (torch.arange(self._ctx_size, dtype=torch.float64) + offset) // length
            values = 1.0 + scale * torch.log1p(steps)
            self._query_scales[temperature] = values.to(self._device, torch.float32)
        return None if temperature is None else self._query_scales[temperature]
