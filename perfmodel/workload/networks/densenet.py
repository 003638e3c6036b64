"""DenseNet-121: each layer of a block reads the concatenated outputs of all earlier ones.

Source: Huang, Liu, van der Maaten & Weinberger, Densely Connected Convolutional Networks, CVPR 2017, table 1.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.networks.images import classify, images


def densenet121(
    *,
    batch: int = 128,
    image: int = 224,
    blocks: tuple[int, ...] = (6, 12, 24, 16),
    growth: int = 32,
    classes: int = 1000,
    synchronised: bool = False,
) -> Graph:
    """Build DenseNet-121. growth: channels that a layer adds; bottleneck 4 growth, stem 2 growth. Transitions halve the channels."""
    b = NetworkBuilder("densenet121", batch=batch, source="Huang et al., Densely Connected Convolutional Networks, CVPR 2017, table 1")

    def activated(prefix: str, x: str) -> str:
        return b.relu(f"{prefix}.relu", b.batch_norm(f"{prefix}.norm", x, synchronised=synchronised))

    b.layer = "stem"
    x = activated("stem", b.convolution("stem.conv", images(b, image), 2 * growth, 7, stride=2, padding=3))
    x = b.pooling("stem.pool", x, 3, stride=2, padding=1)
    for block, count in enumerate(blocks, start=1):
        parts = [x]
        for i in range(count):
            b.layer = prefix = f"block{block}.{i}"
            joined = b.concat(f"{prefix}.concat", *parts) if len(parts) > 1 else x
            y = b.convolution(f"{prefix}.1.conv", activated(f"{prefix}.1", joined), 4 * growth, 1)
            parts.append(b.convolution(f"{prefix}.2.conv", activated(f"{prefix}.2", y), growth, 3, padding=1))
        b.layer = prefix = f"transition{block}"
        x = activated(prefix, b.concat(f"{prefix}.concat", *parts))
        if block < len(blocks):
            x = b.convolution(f"{prefix}.conv", x, b.shape(x)[1] // 2, 1)
            x = b.pooling(f"{prefix}.pool", x, 2, stride=2, mode="average")
    return classify(b, x, classes)
