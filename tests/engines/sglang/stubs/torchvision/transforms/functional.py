"""Import stub."""

from . import InterpolationMode  # noqa: F401


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*args, **kwargs):
        raise NotImplementedError(f"torchvision's {name} is an import stub")

    return function
