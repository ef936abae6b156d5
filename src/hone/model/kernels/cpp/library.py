"""The C++ files as a library for this machine: compiled at the first use, kept in $HONE_HOME, found again later.

`call` hands it tensors and numbers.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch  # the library's threads are those of the OpenMP that it loads
from torch import Tensor

from hone.storage.names import home

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
VARIABLE = "HONE_NATIVE"  # 0: compile nothing
# only wide.h fuses multiply and add: compilers would do so depending on the shape of a loop, which changes bits
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-fno-exceptions", "-fno-rtti")
SECONDS = 120  # the limit for compiling one file; all together take 15
NOTICE = "compiling the CPU kernels, once: about 15 s"
CPUINFO = Path("/proc/cpuinfo")


def library() -> ctypes.CDLL | str:
    """The library, or the reason why there is none."""
    return f"{VARIABLE} is 0" if os.environ.get(VARIABLE) == "0" else _library()


@cache
def _library() -> ctypes.CDLL | str:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler"
    try:
        kept = home() / "native" / f"hone-{fingerprint(compiler)}.so"
        if not kept.exists():
            print(NOTICE, file=sys.stderr, flush=True)
            compile_library(compiler, kept)
        found = ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ library was not built: {error}"
    found.hone_space.restype = ctypes.c_int64
    return found


def fingerprint(compiler: str) -> str:
    """A hash of what the library depends on: sources, compiler, flags and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    about = CPUINFO.read_text() if CPUINFO.exists() else platform.processor()
    able = next((line for line in about.splitlines() if line.startswith(("flags", "Features"))), about)
    parts = [*(source.read_bytes() for source in (*SOURCES, *HEADERS)), version, able.encode(), repr(FLAGS).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def compile_library(compiler: str, target: Path) -> None:
    """Build the library in a folder beside the target and move it there, so that no process loads half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as work:
        if target.exists():
            return
        objects, made = [str(Path(work) / f"{source.stem}.o") for source in SOURCES], Path(work) / target.name
        commands = [
            [compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", to]
            for source, to in zip(SOURCES, objects, strict=True)
        ]
        # not linked with OpenMP: the library then uses the threads of the OpenMP that PyTorch has loaded
        for command in (*commands, [compiler, "-shared", *objects, "-o", str(made)]):
            subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
        made.replace(target)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # this file system has no locks: what others build meanwhile is the same
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def address(x: Tensor) -> ctypes.c_void_p:
    """The tensor's address, as an argument."""
    return ctypes.c_void_p(x.data_ptr())


def argument(x: Any) -> Any:
    """As an argument of a function of the library."""
    if isinstance(x, Tensor):
        return address(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x) if isinstance(x, int) else x


def call(name: str, x: Tensor, *arguments: Any) -> None:
    """Call the library's function of this name for x's dtype."""
    found = library()
    assert not isinstance(found, str)
    function = getattr(found, f"hone_{name}_{'float64' if x.dtype == torch.float64 else 'float32'}")
    function(*map(argument, arguments))
