"""What all ranks of a replica find out together in one small collective: counts, and the digest of a state."""

from collections.abc import Sequence

from crosscloud_trainer.group import ReplicaTotals
from crosscloud_trainer.shard import DIGEST_BITS


def agree(group: ReplicaTotals, counts: Sequence[int], digest: int) -> tuple[list[int], int]:
    """Sums of `counts` over the ranks, and the sum of their digests: that of the replica. Collective."""
    low, high = digest & 0xFFFFFFFF, digest >> 32
    *sums, low, high = group.total([*counts, low, high])
    return sums, (low + (high << 32)) % (1 << DIGEST_BITS)
