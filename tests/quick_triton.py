"""Triton's interpreter prepares its language for each launch, and not for each function that one calls."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_prepare = interpreter._patch_lang


def _prepare_once(fn: Any) -> Any:
    is_new = any(tl.core.is_builtin(language.load) for language in (tl, tl.core))
    return _prepare(fn) if is_new else interpreter._LangPatchScope()


# A version of Triton without scopes keeps its own way.
if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = _prepare_once
