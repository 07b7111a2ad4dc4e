"""Import stub: SGLang imports its CUDA kernels by name, and calls none of them on a CPU.

The real wheel cannot be loaded without CUDA libraries.  Any name can be imported from here or from
a submodule, and raises when it is called.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"
__path__: list[str] = []


def _missing(name):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"{name} is an import stub, and was called on a CPU")

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


class _Submodule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Only those that are imported outright; SGLang asks whether others are there."""

    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel.kvcacheio":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"sgl_kernel.{name}")
