"""Private names of transformers, seen in 5.23. No other module uses private names of its functions."""

from typing import Any

from transformers import PreTrainedModel, masking_utils

from attnspan.base.installed import require_names

#: Method of a model: whether its class calls registered attention functions.
CAN_SET = "_can_set_attn_implementation"
#: Function of `masking_utils` that reads the arguments of all functions that make masks.
READ_ARGUMENTS = "_preprocess_mask_arguments"

require_names(PreTrainedModel, [CAN_SET], "attnspan.integrations.transformers", "transformers")
require_names(masking_utils, [READ_ARGUMENTS], "attnspan.integrations.transformers", "transformers")


def attention_of(config: Any, default: Any = None) -> Any:
    """Return the name of a configuration's attention."""
    return getattr(config, "_attn_implementation", default)


def unregister(interface: Any, name: str) -> None:
    """Undo ``interface.register(name, function)``, for which transformers has no function."""
    interface._global_mapping.pop(name, None)
