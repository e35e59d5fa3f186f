"""Images as rows of a prompt: preprocessing, vision encoders and their projectors, one file a projector."""

from quengine.models.images.decode import ImageError
from quengine.models.vision.load import find_vision, load_processor, load_vision
from quengine.models.vision.processor import ImageProcessor, PreparedImage
from quengine.models.vision.vision_model import VisionModel

__all__ = [
    "ImageError",
    "ImageProcessor",
    "PreparedImage",
    "VisionModel",
    "find_vision",
    "load_processor",
    "load_vision",
]
