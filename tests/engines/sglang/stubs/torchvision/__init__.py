"""Import stub: SGLang imports torchvision for its vision models, and text models use none of it.

Without a distribution's metadata transformers still says that torchvision is not there.
"""

from . import io, transforms  # noqa: F401

__version__ = "0.0.0"
