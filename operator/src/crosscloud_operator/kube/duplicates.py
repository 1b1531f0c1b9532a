"""Which members are one cluster under two names: its GPUs may be counted and given away only once."""

from __future__ import annotations

from crosscloud_operator.domain import inventory
from crosscloud_operator.kube.api import NAMESPACE, World


def duplicates(world: World) -> dict[str, str]:
    """The members whose cluster an older MemberCluster names already, with that one's name."""
    members, seen = world.members(), {}
    for member in members:
        name = str(member["metadata"]["name"])
        cache = world.cache(name, NAMESPACE)
        if cache is not None and (cluster := inventory.cluster_id(cache.objects())):
            seen[name] = cluster
    return inventory.duplicates(members, seen)
