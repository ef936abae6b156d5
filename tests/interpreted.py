"""Triton's interpreter, which runs kernels on a CPU. Import it before anything that imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import inspect

import triton.language as tl
from triton.runtime import interpreter

_patch_tensor, _patch = interpreter._patch_lang_tensor, interpreter._patch_lang


def _patched_tensor(tensor, scope) -> None:
    """Triton 3.6 makes an int of an array of one number, which numpy 2.4 refuses: here it does so by hand."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def _patched(fn):
    """A function that a kernel calls finds the language as the kernel's call has left it: looking again is slow."""
    langs = [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
    if langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
        return interpreter._LangPatchScope()
    return _patch(fn)


interpreter._patch_lang_tensor, interpreter._patch_lang = _patched_tensor, _patched
