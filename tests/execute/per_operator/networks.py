"""Small networks for the tests of `perfmodel import`."""

import torch
import torch.nn.functional as F
from torch import nn


class SmallAlexNet(nn.Module):
    """Convolutions, pooling, fully connected layers and a loss; ReLU in place."""

    def __init__(self, channels=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(channels, 2 * channels, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 2)),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(8 * channels, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))

    def forward(self, images, labels):
        return F.cross_entropy(self.classifier(torch.flatten(self.features(images), 1)), labels)


class ResidualBlock(nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(filters)
        self.second = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(filters)
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x):
        y = self.second_norm(self.second(torch.relu_(self.first_norm(self.first(x)))))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class LanguageLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 100)

    def forward(self, tokens, labels):
        hidden, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class OddProducts(nn.Module):
    """Grouped, depthwise and transposed convolutions, einsum, batched products, a shared weight and an unread one."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(8, 16, 3, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.up = nn.ConvTranspose2d(16, 4, 2, 2)
        self.one = nn.Linear(6, 6)
        self.same = nn.Linear(6, 6)
        self.same.weight = self.one.weight
        self.unread = nn.Linear(5, 7)

    def forward(self, x):
        y = self.up(self.depthwise(self.grouped(x))).flatten(2)[:, :, :36].unflatten(2, (6, 6))
        z = torch.einsum("bcij,bcjk->bcik", y, self.same(self.one(y)))
        left, right = z.chunk(2, dim=1)
        stacked = torch.stack([torch.matmul(left, right.transpose(2, 3)), left - right], dim=1)
        return torch.cat([stacked, stacked.softmax(-1)], dim=-1).sum()


class WithFourier(nn.Module):
    """An operator without a rule."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.fft.rfft(self.linear(x)).abs()


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class NeedsASize(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x):
        return self.linear(x)


def not_a_module():
    return "a string"


def broken():
    raise RuntimeError("no such checkpoint\nand more lines")
