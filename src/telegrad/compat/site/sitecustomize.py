"""Runs at the start of every Python process that a program under ``telegrad.compat`` starts (``compat/children.py``).

It hides itself, runs the ``sitecustomize`` that would have run without it, and waits for ``import torch``.  Installing
immediately would load torch, which takes two seconds, into every helper process too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))  # where telegrad is, if it was not installed


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch with the other finders, and installs telegrad after torch has been loaded."""

    asked = False

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch" or self.asked:
            return None
        self.asked = True  # for the others, now; a program may look for torch long before it imports it
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = ThenInstall(spec.loader)  # type: ignore[no-untyped-call]
        return spec


class ThenInstall(importlib.abc.Loader):
    def __init__(self, loader):  # type: ignore[no-untyped-def]
        self._loader = loader

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if importlib.util.find_spec("telegrad") is None:
            sys.path.append(SOURCE)
        from telegrad.compat import install

        install()


def run_the_next_one() -> None:
    """Another sitecustomize, of the environment or the distribution, that comes later on the path."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
if os.environ.get("TELEGRAD_COMPAT"):
    sys.meta_path.insert(0, AfterTorch())
run_the_next_one()
