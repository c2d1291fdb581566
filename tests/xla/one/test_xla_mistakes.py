"""What users type by mistake, on XLA tensors."""

import pytest
import torch

from attnspan import causal, full
from attnspan.xla import attention

X = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))


def test_keywords_of_other_libraries_are_refused_with_ours() -> None:
    x = X.to("xla")
    with pytest.raises(TypeError, match=r"got is_causal=\. Pass mask=causal\(\)"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"got maks=\. Write mask=\."):
        attention(x, x, x, maks=causal())


def test_a_function_that_was_not_called_is_named() -> None:
    x = X.to("xla")
    with pytest.raises(TypeError, match=r"got the function causal\. Call it: causal\(\)\."):
        attention(x, x, x, mask=causal)


def test_no_mask_is_the_full_one() -> None:
    x = X.to("xla")
    assert torch.equal(attention(x, x, x, mask=None).cpu(), attention(x, x, x, mask=full()).cpu())
