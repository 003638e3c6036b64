"""Convolutional networks: AlexNet, ResNet and DenseNet; the input data and the classification head of image networks.

Sources: AlexNet, Krizhevsky, Sutskever & Hinton, ImageNet Classification with Deep Convolutional Neural Networks, NIPS 2012; ResNet, He,
Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1; DenseNet, Huang, Liu, van der Maaten & Weinberger,
Densely Connected Convolutional Networks, CVPR 2017, table 1.
"""

from __future__ import annotations

from perfmodel.foundation.errors import bad_field
from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder


def images(b: NetworkBuilder, side: int) -> str:
    """Declare the data: `side` x `side` pixels of three colours."""
    return b.input("images", b.batch, 3, side, side)


def classify(b: NetworkBuilder, x: str, classes: int) -> Graph:
    """Write global average pooling, one fully connected layer and the loss; return the graph."""
    b.layer = "head"
    x = b.mean("mean", x, "b c h w", "b c")
    logits = b.linear("fc", x, "b c", "n c", "b n", new={"n": classes})
    b.cross_entropy(logits, "b n", "n")
    return b.build()


def alexnet(
    *,
    batch: int = 128,
    image: int = 227,
    filters: tuple[int, ...] = (96, 256, 384, 384, 256),
    hidden: int = 4096,
    classes: int = 1024,
) -> Graph:
    """Build AlexNet as in the graph of Elango, PaSE, IPDPS 2021: without groups, local response normalisation and dropout."""
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


_EXPANSION = 4  # output channels of a block over its inner channels


def resnet50(*, batch: int = 128, image: int = 224, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000,
             synchronised: bool = False) -> Graph:  # fmt: skip
    return _resnet("resnet50", batch, image, blocks, width, classes, synchronised)


def resnet101(*, batch: int = 128, image: int = 224, blocks: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 1000,
              synchronised: bool = False) -> Graph:  # fmt: skip
    return _resnet("resnet101", batch, image, blocks, width, classes, synchronised)


def _resnet(name: str, batch: int, image: int, blocks: tuple[int, ...], width: int, classes: int, synchronised: bool) -> Graph:
    """Build a ResNet of bottleneck blocks with the stride in the 3 x 3 convolution (version 1.5, as in torchvision).

    blocks: of each stage; width: channels of the first stage; synchronised: batch normalisation over the full batch
    """
    b = NetworkBuilder(name, batch=batch, source="He et al., Deep Residual Learning for Image Recognition, CVPR 2016, table 1")

    def normalised(prefix: str, x: str, filters: int, window: int, stride: int = 1) -> str:
        x = b.convolution(f"{prefix}.conv", x, filters, window, stride=stride, padding=window // 2)
        return b.batch_norm(f"{prefix}.norm", x, synchronised=synchronised)

    b.layer = "stem"
    x = b.relu("stem.relu", normalised("stem", images(b, image), width, 7, 2))
    x = b.pooling("stem.pool", x, 3, stride=2, padding=1)
    for stage, count in enumerate(blocks):
        channels = width * 2**stage
        for block in range(count):
            prefix = f"stage{stage + 1}.{block}"
            stride = 2 if stage and not block else 1
            b.layer = prefix
            y = b.relu(f"{prefix}.1.relu", normalised(f"{prefix}.1", x, channels, 1))
            y = b.relu(f"{prefix}.2.relu", normalised(f"{prefix}.2", y, channels, 3, stride))
            y = normalised(f"{prefix}.3", y, _EXPANSION * channels, 1)
            if not block:
                x = normalised(f"{prefix}.shortcut", x, _EXPANSION * channels, 1, stride)
            x = b.relu(f"{prefix}.relu", b.pointwise(f"{prefix}.add", "add", (y, "b c h w"), (x, "b c h w")))
    return classify(b, x, classes)


def densenet121(
    *,
    batch: int = 128,
    image: int = 224,
    blocks: tuple[int, ...] = (6, 12, 24, 16),
    growth: int = 32,
    classes: int = 1000,
    synchronised: bool = False,
) -> Graph:
    """Build DenseNet-121: each layer of a block reads the concatenated outputs of all earlier ones.

    growth: channels that a layer adds; bottleneck 4 growth, stem 2 growth. Transitions halve the channels.
    """
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
