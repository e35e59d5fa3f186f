"""Settings of released models' vision encoders, by the model's name: for benchmarks and synthetic projectors."""

from typing import Any

from quengine.models.vision.settings import LANCZOS, VisionSettings

_HALF = (0.5, 0.5, 0.5)
_SIGLIP: dict[str, Any] = {
    "width": 1152,
    "layers": 27,
    "heads": 16,
    "feed_forward": 4304,
    "eps": 1e-6,
    "mean": _HALF,
    "std": _HALF,
}
PROJECTORS_OF: dict[str, VisionSettings] = {
    "qwen3.5": VisionSettings(
        projector="qwen3vl_merger",
        patch=16,
        image_size=768,
        text_size=4096,
        merge=2,
        min_pixels=1 << 16,
        max_pixels=1 << 24,
        features={"deepstack": ()},
        **_SIGLIP,
    ),
    "mistral-small": VisionSettings(
        projector="pixtral",
        width=1024,
        layers=24,
        heads=16,
        feed_forward=4096,
        patch=14,
        image_size=1540,
        text_size=5120,
        eps=1e-5,
        mean=_HALF,
        std=_HALF,
        activation="silu",
        merge=2,
        longest_edge=1540,
    ),
    "gemma-3": VisionSettings(
        projector="gemma3", patch=14, image_size=896, text_size=2560, merge=4, **_SIGLIP
    ),
    "gemma-4": VisionSettings(
        projector="gemma4v",
        patch=16,
        image_size=1,
        text_size=2816,
        merge=3,
        theta=100.0,
        features={"rows": 280, "positions": 10240, "bidirectional": True},
        **_SIGLIP,
    ),
    "smolvlm2-500m": VisionSettings(
        projector="idefics3",
        width=768,
        layers=12,
        heads=12,
        feed_forward=3072,
        patch=16,
        image_size=512,
        text_size=960,
        eps=1e-6,
        mean=_HALF,
        std=_HALF,
        merge=4,
        tile=512,
        longest_edge=2048,
        resample=LANCZOS,
    ),
}
