"""ResNet-50 and -101: bottleneck blocks with the stride in the 3 x 3 convolution (version 1.5, as in torchvision).

Source: He, Zhang, Ren & Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder
from perfmodel.workload.networks.images import classify, images

#: Output channels of a block over its inner channels.
_EXPANSION = 4


def resnet50(*, batch: int = 128, image: int = 224, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000,
             synchronised: bool = False) -> Graph:  # fmt: skip
    return _resnet("resnet50", batch, image, blocks, width, classes, synchronised)


def resnet101(*, batch: int = 128, image: int = 224, blocks: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 1000,
              synchronised: bool = False) -> Graph:  # fmt: skip
    return _resnet("resnet101", batch, image, blocks, width, classes, synchronised)


def _resnet(name: str, batch: int, image: int, blocks: tuple[int, ...], width: int, classes: int, synchronised: bool) -> Graph:
    """Build a ResNet. blocks: of each stage; width: channels of the first stage; synchronised: batch normalisation over the full batch."""
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
