"""Import stub."""

from enum import Enum


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Transform:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is an import stub")


CenterCrop = Compose = Lambda = Normalize = Resize = ToTensor = _Transform

from . import functional  # noqa: F401, E402
