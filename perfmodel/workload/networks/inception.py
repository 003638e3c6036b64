"""InceptionV3 without its auxiliary classifier, layer by layer as in torchvision.

Source: Szegedy, Vanhoucke, Ioffe, Shlens & Wojna, Rethinking the Inception Architecture for Computer Vision, CVPR 2016.
"""

from __future__ import annotations

from perfmodel.workload.graph import Graph
from perfmodel.workload.networks.builder import NetworkBuilder, Window
from perfmodel.workload.networks.images import classify, images

_EPS = 1e-3


class _Inception:
    """The blocks; `divisor`: factor by which every layer is narrower."""

    def __init__(self, b: NetworkBuilder, divisor: int, synchronised: bool) -> None:
        self.b = b
        self.divisor = divisor
        self.synchronised = synchronised

    def conv(self, name: str, x: str, filters: int, window: Window, *, stride: int = 1, padding: Window = 0) -> str:
        """Add a convolution, batch normalisation and ReLU."""
        prefix = f"{self.b.layer}.{name}"
        x = self.b.convolution(f"{prefix}.conv", x, max(1, filters // self.divisor), window, stride=stride, padding=padding)
        return self.b.relu(f"{prefix}.relu", self.b.batch_norm(f"{prefix}.norm", x, synchronised=self.synchronised, eps=_EPS))

    def average(self, x: str) -> str:
        return self.b.pooling(f"{self.b.layer}.pool", x, 3, stride=1, padding=1, mode="average")

    def maximum(self, x: str) -> str:
        return self.b.pooling(f"{self.b.layer}.pool", x, 3, stride=2)

    def join(self, *parts: str) -> str:
        return self.b.concat(f"{self.b.layer}.concat", *parts)

    def block_a(self, x: str, pool_filters: int) -> str:
        one = self.conv("1x1", x, 64, 1)
        five = self.conv("5x5_2", self.conv("5x5_1", x, 48, 1), 64, 5, padding=2)
        three = self.conv("3x3_2", self.conv("3x3_1", x, 64, 1), 96, 3, padding=1)
        three = self.conv("3x3_3", three, 96, 3, padding=1)
        return self.join(one, five, three, self.conv("pool_1x1", self.average(x), pool_filters, 1))

    def block_b(self, x: str) -> str:
        three = self.conv("3x3", x, 384, 3, stride=2)
        twice = self.conv("double_2", self.conv("double_1", x, 64, 1), 96, 3, padding=1)
        return self.join(three, self.conv("double_3", twice, 96, 3, stride=2), self.maximum(x))

    def block_c(self, x: str, inner: int) -> str:
        row: tuple[Window, Window] = ((1, 7), (0, 3))
        column: tuple[Window, Window] = ((7, 1), (3, 0))
        one = self.conv("1x1", x, 192, 1)
        seven = self.conv("7x7_1", x, inner, 1)
        for i, (filters, (window, padding)) in enumerate(((inner, row), (192, column)), start=2):
            seven = self.conv(f"7x7_{i}", seven, filters, window, padding=padding)
        twice = self.conv("double_1", x, inner, 1)
        for i, (filters, (window, padding)) in enumerate(((inner, column), (inner, row), (inner, column), (192, row)), start=2):
            twice = self.conv(f"double_{i}", twice, filters, window, padding=padding)
        return self.join(one, seven, twice, self.conv("pool_1x1", self.average(x), 192, 1))

    def block_d(self, x: str) -> str:
        three = self.conv("3x3_2", self.conv("3x3_1", x, 192, 1), 320, 3, stride=2)
        seven = self.conv("7x7_1", x, 192, 1)
        seven = self.conv("7x7_2", seven, 192, (1, 7), padding=(0, 3))
        seven = self.conv("7x7_3", seven, 192, (7, 1), padding=(3, 0))
        return self.join(three, self.conv("7x7_4", seven, 192, 3, stride=2), self.maximum(x))

    def block_e(self, x: str) -> str:
        one = self.conv("1x1", x, 320, 1)
        three = self.conv("3x3_1", x, 384, 1)
        twice = self.conv("double_2", self.conv("double_1", x, 448, 1), 384, 3, padding=1)
        parts = [one]
        for name, y in (("3x3", three), ("double", twice)):
            parts += [self.conv(f"{name}_row", y, 384, (1, 3), padding=(0, 1)), self.conv(f"{name}_column", y, 384, (3, 1), padding=(1, 0))]
        return self.join(*parts, self.conv("pool_1x1", self.average(x), 192, 1))


def inception3(*, batch: int = 128, image: int = 299, width_divisor: int = 1, classes: int = 1000, synchronised: bool = False) -> Graph:
    """Build the network. width_divisor: factor by which every layer has fewer filters."""
    b = NetworkBuilder("inception3", batch=batch, source="Szegedy et al., Rethinking the Inception Architecture, CVPR 2016")
    net = _Inception(b, width_divisor, synchronised)
    b.layer = "stem"
    x = net.conv("1", images(b, image), 32, 3, stride=2)
    x = net.conv("3", net.conv("2", x, 32, 3), 64, 3, padding=1)
    x = b.pooling("stem.pool1", x, 3, stride=2)
    x = net.conv("5", net.conv("4", x, 80, 1), 192, 3)
    x = b.pooling("stem.pool2", x, 3, stride=2)
    for i, pool_filters in enumerate((32, 64, 64)):
        b.layer = f"mixed_a{i}"
        x = net.block_a(x, pool_filters)
    b.layer = "mixed_b"
    x = net.block_b(x)
    for i, inner in enumerate((128, 160, 160, 192)):
        b.layer = f"mixed_c{i}"
        x = net.block_c(x, inner)
    b.layer = "mixed_d"
    x = net.block_d(x)
    for i in range(2):
        b.layer = f"mixed_e{i}"
        x = net.block_e(x)
    return classify(b, x, classes)
