"""Builds the native core as ``tiermem._native`` (cffi, API mode).

The declarations given to cffi are the part of ``include/tiermem.h`` between its two markers, so
the header is the only place where the interface is written. libaio is opened at run time; its
headers are not needed.
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent
HEADER = (ROOT / "include" / "tiermem.h").read_text(encoding="utf-8")

_, _, _rest = HEADER.partition("/* cffi-begin */")
_declarations, _, _ = _rest.partition("/* cffi-end */")

ffibuilder = FFI()
ffibuilder.cdef(re.sub(r"/\*.*?\*/", "", _declarations, flags=re.DOTALL))
ffibuilder.set_source(
    "tiermem._native",
    '#include "tiermem.h"',
    sources=[f"native/src/{source.name}" for source in sorted((ROOT / "src").glob("*.c"))],
    depends=["native/include/tiermem.h", *(f"native/src/{h.name}" for h in (ROOT / "src").glob("*.h"))],
    include_dirs=["native/include", "native/src"],
    # No contraction: a product and a sum fuse only where the code says fma, so that every variant
    # of a kernel gives the same bits.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-g",
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-Wno-unused-parameter",
    ],
    libraries=["m", "dl", "pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
