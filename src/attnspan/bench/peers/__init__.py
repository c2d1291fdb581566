"""Who is compared: each peer is adapted in a few lines, and says why it cannot do a workload."""

from torch.nn.attention import SDPBackend

from attnspan.bench.peers.flash import FlashAttn
from attnspan.bench.peers.flex import Flex
from attnspan.bench.peers.jax_peers import JaxAttention
from attnspan.bench.peers.job import Job as Job
from attnspan.bench.peers.job import Peer as Peer
from attnspan.bench.peers.job import Ready as Ready
from attnspan.bench.peers.ours import Attnspan
from attnspan.bench.peers.ours_jax import AttnspanJax
from attnspan.bench.peers.sdpa import DenseMask, FusedKernel, PerDocument

__all__ = ["PEERS", "Job", "Peer", "Ready", "peers_by_name"]

#: Every peer, attnspan first.
PEERS: tuple[Peer, ...] = (
    Attnspan(),
    FusedKernel("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    FusedKernel("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
    FusedKernel("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    DenseMask(),
    PerDocument(),
    Flex(),
    AttnspanJax(),
    JaxAttention("jax", "jax", "jax.nn"),
    JaxAttention("tokamax", "tokamax", "tokamax"),
    FlashAttn(),
)


def peers_by_name() -> dict[str, Peer]:
    """Every peer by its name, attnspan first.

    Example:
        >>> next(iter(peers_by_name()))
        'attnspan'
    """
    return {peer.name: peer for peer in PEERS}
