"""Triton's interpreter, which runs kernels on a CPU. Import it before anything that imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    """Triton 3.6 makes an int of an array of one number, which numpy 2.4 refuses: here it does so by hand."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _patched
