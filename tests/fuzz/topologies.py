"""Random clusters that are valid: the fields of a cluster file, tiers of every topology inside each other."""

import random
from typing import Any

RATES = ("400 Gbit/s", "25 GB/s", "900 GB/s", "12.5 MB/s", "3 TB/s")
LATENCIES = ("0 s", "600 ns", "5 us", "1 ms")
FILE_NOTES = {"provenance": "recalled", "source": "random"}


def random_cluster(rng: random.Random, chip: str = "h100-sxm-80gb") -> dict[str, Any]:
    """One to three tiers, a node that is a part of one, any number of chips that the cluster takes."""
    node = rng.choice((1, 1, 2, 4, 8, 16))
    tiers: list[dict[str, Any]] = []
    size = 1
    for number in range(rng.randint(1, 3)):
        factor = rng.choice((node, 2, 4)) if number == 0 else rng.choice((2, 4, 8, 64))
        if number == 0 and node > 1 and rng.random() < 0.3:
            factor = rng.choice([part for part in (1, 2, 4, 8, 16) if node % part == 0])  # part of a node, as NVLink bridges
        new = size * factor
        if new % node and node % new:
            continue
        if tiers and new == size:
            continue
        tiers.append(_tier(rng, f"tier-{number}", inner=size, size=new))
        size = new
    if size < node:
        tiers.append(_tier(rng, "node", inner=size, size=node))
        size = node
    num_chips = node * rng.randint(1, size // node) if rng.random() < 0.5 else size
    return {
        "name": "random",
        "chip": chip,
        "num_chips": num_chips,
        "chips_per_node": node,
        "tiers": tiers,
        **FILE_NOTES,
    }


def _tier(rng: random.Random, name: str, *, inner: int, size: int) -> dict[str, Any]:
    topology = rng.choice(("switch", "switch", "fat_tree", "full_mesh", "torus", "pcie_tree"))
    tier: dict[str, Any] = {
        "name": name,
        "topology": topology,
        "size": size,
        "bandwidth": rng.choice(RATES),
        "latency": rng.choice(LATENCIES),
        **FILE_NOTES,
    }
    if topology == "torus":
        tier["torus_shape"] = [size // inner] if rng.random() < 0.5 or (size // inner) % 2 else [2, size // inner // 2]
        if rng.random() < 0.5:
            tier["wrap_multiple"] = rng.choice((1, 4))
    if topology == "full_mesh" and rng.random() < 0.5:
        tier["pair_bandwidth"] = "1 MB/s"
    if topology == "fat_tree" and rng.random() < 0.5:
        tier["oversubscription"] = 2.0
    if topology == "pcie_tree" and rng.random() < 0.5:
        tier["peer_to_peer"] = False
    return tier
