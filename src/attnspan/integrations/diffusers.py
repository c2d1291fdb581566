"""attnspan in Hugging Face diffusers: call ``enable(transformer_or_pipeline)``.

Importing this module also calls ``enable()``, which registers a backend, so you can call
``transformer.set_attention_backend("attnspan")``. Newer diffusers models look up their backend, older models
call torch's function. `enable` supports both, for one model at a time.
"""

from attnspan.base.installed import require

require("diffusers", "attnspan.integrations.diffusers", "diffusers", ("0.40", "0.43"))

from ._diffusers_attention import attend  # noqa: E402
from ._diffusers_enable import NAME, Enabled, disable, enable  # noqa: E402
from ._diffusers_parallel import (  # noqa: E402
    Rows,
    TokenPlan,
    average_gradients,
    parallelize,
    parallelized,
    unparallelize,
)

__all__ = [
    "NAME",
    "Enabled",
    "Rows",
    "TokenPlan",
    "attend",
    "average_gradients",
    "disable",
    "enable",
    "parallelize",
    "parallelized",
    "unparallelize",
]


enable()
