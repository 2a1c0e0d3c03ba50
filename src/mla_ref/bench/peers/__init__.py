"""Other libraries' kernels on the same work; one that is not there is a line that says so."""

from mla_ref.bench.peers.b12x import B12x
from mla_ref.bench.peers.flash_mla import FlashMLA
from mla_ref.bench.peers.flashinfer import FlashInferSM120
from mla_ref.bench.peers.peer import Peer, Way
from mla_ref.bench.peers.sdpa import TorchSDPA

__all__ = ["B12x", "FlashInferSM120", "FlashMLA", "Peer", "TorchSDPA", "Way"]
