"""How shards travel: all-gather and reduce-scatter of one flat buffer of W equal pieces of S elements.
On CPU (gloo) each rank exchanges pieces with each other one directly: gloo's own all-gather takes twice the time, and
its reduce-scatter is an all-reduce of twice the bytes. Sums are made here, in fp32 and in rank order, so that they have
the same bits whenever they are repeated, also where 16-bit values travel. On accelerators NCCL's or HCCL's collectives
run on a stream of their own; sums only, since averages and pre-multiplied sums differ by backend."""

from dataclasses import dataclass
from typing import Any
import torch
import torch.distributed as dist
from fullshard.device import SideStream


@dataclass
class Transfer:
    """A gather or reduction under way; ``received`` holds the other ranks' pieces (W - 1, S) of a reduction on CPU."""

    works: list[Any]
    stream: SideStream
    received: torch.Tensor | None = None

    def wait(self) -> None:
        """Until the data is there: the process on CPU, the current stream on an accelerator."""
        for work in self.works:
            work.wait()
        self.stream.join()
        self.works = []


class Wire:
    """One process group used for one purpose, so that gathers and reductions do not wait for each other."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.num_ranks, self.rank = group, group.size(), group.rank()
        self._pairwise, self._stream = device.type == "cpu", SideStream(device)
        self._peers = [dist.get_global_rank(group, rank) for rank in range(self.num_ranks)]

    def gather(self, pieces_WS: torch.Tensor, own_S: torch.Tensor) -> Transfer:
        """Fill ``pieces_WS`` with every rank's ``own_S``, cast to its dtype."""
        with self._stream:
            mine = pieces_WS[self.rank]
            mine.copy_(own_S)
            if self._pairwise:
                return Transfer(self._exchange(lambda rank: mine, lambda rank: pieces_WS[rank]), self._stream)
            work = dist.all_gather_into_tensor(pieces_WS, mine, group=self.group, async_op=True)
            return Transfer([work], self._stream)

    def reduce(self, pieces_WS: torch.Tensor) -> Transfer:
        """Send piece r of ``pieces_WS`` to rank r. Give the transfer and the pieces to ``total`` afterwards."""
        with self._stream:
            if self._pairwise:
                received = pieces_WS.new_empty(self.num_ranks - 1, pieces_WS.shape[1])
                works = self._exchange(lambda rank: pieces_WS[rank], lambda rank: received[rank - (rank > self.rank)])
                return Transfer(works, self._stream, received)
            work = dist.reduce_scatter_tensor(pieces_WS[self.rank], pieces_WS, group=self.group, async_op=True)
            return Transfer([work], self._stream)

    def total(self, transfer: Transfer, pieces_WS: torch.Tensor) -> torch.Tensor:
        """Wait, and sum this rank's piece over the ranks: (S,) fp32 (fp64 of fp64)."""
        transfer.wait()
        own = pieces_WS[self.rank]
        dtype = torch.promote_types(own.dtype, torch.float32)
        if transfer.received is None:
            return own.to(dtype, copy=True)
        ordered = [*transfer.received[: self.rank], own, *transfer.received[self.rank :]]
        total = ordered[0].to(dtype, copy=True)
        for piece in ordered[1:]:
            total += piece
        return total

    def _exchange(self, outgoing: Any, incoming: Any) -> list[Any]:
        """Receive ``incoming(rank)`` from and send ``outgoing(rank)`` to every other rank."""
        works = []
        for step in range(1, self.num_ranks):
            source, target = (self.rank - step) % self.num_ranks, (self.rank + step) % self.num_ranks
            works.append(dist.irecv(incoming(source), self._peers[source], group=self.group))
            works.append(dist.isend(outgoing(target), self._peers[target], group=self.group))
        return works
