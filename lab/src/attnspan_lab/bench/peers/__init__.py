"""Peers of the benchmarks: other attention implementations. Each says why it cannot run a workload."""

from collections.abc import Sequence

from torch.nn.attention import SDPBackend

from attnspan.errors import OptionError
from attnspan_lab.bench.peers.flex import Flex
from attnspan_lab.bench.peers.inductor import Inductor
from attnspan_lab.bench.peers.jax_peers import AttnspanJax, JaxAttention
from attnspan_lab.bench.peers.job import Job as Job
from attnspan_lab.bench.peers.job import Peer as Peer
from attnspan_lab.bench.peers.job import Ready as Ready
from attnspan_lab.bench.peers.onnxruntime_peer import OnnxRuntime
from attnspan_lab.bench.peers.openvino_peer import OpenVino
from attnspan_lab.bench.peers.torch_peers import Attnspan, DenseMask, FlashAttn, FusedKernel, PerDocument

__all__ = ["PEERS", "Job", "Peer", "Ready", "peers_by_name", "peers_named"]

#: All peers, attnspan first.
PEERS: tuple[Peer, ...] = (
    Attnspan(),
    Attnspan("vendor"),
    Attnspan("flex"),
    Attnspan("triton"),
    FusedKernel("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    FusedKernel("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    FusedKernel("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    DenseMask(),
    PerDocument(),
    Flex(),
    Inductor(),
    OpenVino(),
    OnnxRuntime(),
    AttnspanJax(),
    JaxAttention("jax", "jax.nn"),
    JaxAttention("tokamax", "tokamax"),
    FlashAttn("flash-attn", "flash_attn"),
    FlashAttn("flash-attn-3", "flash_attn_interface"),
    FlashAttn("flash-attn-4", "flash_attn.cute"),
)


def peers_by_name() -> dict[str, Peer]:
    """Map names to peers, attnspan first."""
    return {peer.name: peer for peer in PEERS}


def peers_named(names: Sequence[str]) -> tuple[Peer, ...]:
    """Return the peers with these names. attnspan is always the first. Without names, all peers are selected.

    Raises:
        OptionError: A name is unknown.

    Example:
        >>> [peer.name for peer in peers_named(["jax"])]
        ['attnspan', 'jax']
    """
    for name in set(names) - set(peers_by_name()):
        known = ", ".join(peers_by_name())
        raise OptionError("peers", expected=f"some of {known}", got=repr(name), remedy="Use one of these")
    return tuple(peer for i, peer in enumerate(PEERS) if i == 0 or not names or peer.name in names)
