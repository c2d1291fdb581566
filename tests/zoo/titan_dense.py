"""An oracle inside torchtitan: attention over all pairs, under the mask that torchtitan itself makes."""

from dataclasses import dataclass

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention


class DenseAttention(FlexAttention):
    """Reads FlexAttention's mask function; shares no code with attnspan."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None, **_):
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        batch, seq = torch.arange(len(q))[:, None, None, None], torch.arange(q.shape[2])
        visible = attention_masks.mask_mod(batch, 0, seq[:, None], seq)
        scores = scores.masked_fill(~visible, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return out if out_transform is None else out_transform(out, scores.logsumexp(-1).transpose(1, 2))


@override(target=FlexAttention.Config)
def dense(config):
    """Put the oracle in place of FlexAttention."""
    return derive(config, DenseAttention.Config)
