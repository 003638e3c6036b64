"""The domains that follow from all tiers of a cluster."""

from perfmodel.hardware.cluster import Cluster


def scale_up_size(cluster: Cluster) -> int:
    """Chips of one scale-up domain: the largest tier below the scale-out fabric."""
    return max((tier.size for tier in cluster.tiers if not cluster.is_scale_out(tier)), default=1)
