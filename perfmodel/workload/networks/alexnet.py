"""AlexNet without groups, as in PaSE: 227 x 227 images, 96 to 384 filters, three fully connected layers, 1024 classes.

Source: Krizhevsky, Sutskever & Hinton, ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012; sizes as in the graph of
Elango, PaSE, IPDPS 2021 (no groups, no local response normalisation). Dropout is not modelled.
"""

from __future__ import annotations

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.networks.images import images


def alexnet(
    *,
    batch: int = 128,
    image: int = 227,
    filters: tuple[int, ...] = (96, 256, 384, 384, 256),
    hidden: int = 4096,
    classes: int = 1024,
) -> Graph:
    b = NetworkBuilder("alexnet", batch=batch, source="Elango, PaSE (IPDPS 2021), graph of AlexNet; Krizhevsky et al., NIPS 2012")
    x = images(b, image)
    windows = (11, 5, 3, 3, 3)
    if len(filters) != len(windows):
        raise bad_field("filters", len(filters), f"must be one for each of the {len(windows)} convolutions", f"give {len(windows)}")
    for i, (count, window) in enumerate(zip(filters, windows, strict=True), start=1):
        stride, padding = (4, 0) if i == 1 else (1, window // 2)
        b.layer = f"conv{i}"
        x = b.relu(f"relu{i}", b.convolution(f"conv{i}", x, count, window, stride=stride, padding=padding, bias=True))
        if i in (1, 2, 5):
            x = b.pooling(f"pool{i}", x, 3, stride=2)
    b.layer = "fc6"
    # The fully connected layer reads the image unflattened: its weight has positions for c, h and w.
    x = b.relu("relu6", b.linear("fc6", x, "b c h w", "n c h w", "b n", new={"n": hidden}), "b n")
    b.layer = "fc7"
    x = b.relu("relu7", b.linear("fc7", x, "b c", "n c", "b n", new={"n": hidden}), "b n")
    b.layer = "fc8"
    logits = b.linear("fc8", x, "b c", "n c", "b n", new={"n": classes})
    b.cross_entropy(logits, "b n", "n")
    return b.build()
