"""Adds the native core to the build. Without a compiler the install goes on without it."""

from __future__ import annotations

import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext

LOST = (
    "tiermem: the native core was NOT built ({reason}).\n"
    "tiermem: everything works, on Python I/O threads and torch kernels, several times slower.\n"
    "tiermem: install a C compiler (gcc) and the Python headers, then reinstall, to get it."
)


class OptionalBuildExt(build_ext):
    """Building the native core is best effort: a failure is a warning that says what is lost."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self._warn(error)

    def build_extension(self, ext: object) -> None:
        try:
            super().build_extension(ext)  # type: ignore[arg-type]
        except Exception as error:
            self._warn(error)

    def copy_extensions_to_source(self) -> None:
        try:
            super().copy_extensions_to_source()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        print(LOST.format(reason=str(error).splitlines()[0][:200]), file=sys.stderr)


setup(
    cffi_modules=["native/build_native.py:ffibuilder"],
    cmdclass={"build_ext": OptionalBuildExt},
)
