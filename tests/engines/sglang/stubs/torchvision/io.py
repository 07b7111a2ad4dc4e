"""Import stub."""


class ImageReadMode:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torchvision is an import stub")


def decode_jpeg(*args, **kwargs):
    raise NotImplementedError("torchvision is an import stub")


decode_image = decode_jpeg
