"""Ray's request router with our policy, by shared prefix and load. There is one in every process that routes.

Ray calls the API of request routers alpha. ``tests/ray`` runs against the version that is locked.
"""

from __future__ import annotations

import zlib
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from microscale.integrations.prefix_routing import PrefixPolicy
from microscale.integrations.ray_serve_request import RoutedRequest


class PrefixRouter(RequestRouter):
    """Replicas get numbers for the policy; the number of a replica that has ended is reused."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = PrefixPolicy(**kwargs)
        self._numbers: dict[ReplicaID, int] = {}
        self._open: dict[int, int] = {}
        """Open requests of this router, by the replica's number."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        routed = _routed_request(pending_request)
        if pending_request is not None:
            # One round tries all replicas; Ray waits before the next.
            pending_request.routing_context.should_backoff = True
        by_number = {self._numbers[r.replica_id]: r for r in candidate_replicas if r.replica_id in self._numbers}
        loads = {number: self._load(number, replica) for number, replica in by_number.items()}
        order = [by_number[number] for number in self._policy.order(routed.chain if routed else (), loads)]
        if routed is not None and (routed.avoid or routed.home is not None):
            order.sort(key=lambda replica: (replica.replica_id in routed.avoid, replica.replica_id != routed.home))
        return [[replica] for replica in order]

    def _load(self, number: int, replica: RunningReplica) -> int:
        """Open requests: this router's, or all that the replica has reported lately."""
        return max(self._open.get(number, 0), self.replica_queue_len_cache.get(replica.replica_id) or 0)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        here = {replica.replica_id for replica in replicas}
        for gone in self._numbers.keys() - here:
            self._drop(gone)
        free = (n for n in range(len(here)) if n not in set(self._numbers.values()))
        for new in sorted(here - self._numbers.keys(), key=str):
            self._numbers[new] = next(free)
            self._policy.join(self._numbers[new], zlib.crc32(str(new).encode()))
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._drop(replica_id)
        super().on_replica_actor_died(replica_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        if (number := self._numbers.get(replica_id)) is not None:
            self._open[number] = self._open.get(number, 0) + 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        routed, number = _routed_request(pending_request), self._numbers.get(replica_id)
        if routed is not None and number is not None:
            routed.replica = replica_id
            self._policy.routed(routed.chain, number)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if (number := self._numbers.get(replica_id)) is not None:
            self._open[number] = max(0, self._open.get(number, 0) - 1)

    def _drop(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._open.pop(number, None)
            self._policy.forget(number)


def _routed_request(pending: PendingRequest | None) -> RoutedRequest | None:
    if pending is None or not pending.args:
        return None
    first = pending.args[0]
    return first if isinstance(first, RoutedRequest) else None
