"""The models that the benches train, each with a batch of synthetic data, the same in every process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spmd.cli.bench.contenders import Model, mlp
from spmd.cli.bench.contenders import mlp_1k as mlp_1k

CLASSES = 10


class Encoder(nn.Module):
    """Six transformer layers of width 256 over sequences of 128, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def mlp_4k() -> Model:
    """1024-4096-4096-10, with 128 samples."""
    torch.manual_seed(0)
    return mlp(1024, 4096, CLASSES), torch.randn(128, 1024), torch.randint(0, CLASSES, (128,))


def encoder() -> Model:
    """With 8 sequences."""
    torch.manual_seed(0)
    return Encoder(), torch.randn(8, 128, 256), torch.randint(0, CLASSES, (8,))


def cnn() -> Model:
    """Three convolutions over 128 images of 32x32."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))
    return model, torch.randn(128, 3, 32, 32), torch.randint(0, CLASSES, (128,))


def small() -> Model:
    """8-16-16-10, with 8 samples: for a test of the benches themselves."""
    torch.manual_seed(0)
    return mlp(8, 16, CLASSES), torch.randn(8, 8), torch.randint(0, CLASSES, (8,))


def square_of(parameters: int) -> Model:
    """One weight matrix with about as many parameters, and 16 samples: arithmetic grows as the bytes do."""
    torch.manual_seed(0)
    width = round(parameters**0.5)
    model = nn.Linear(width, width, bias=False)
    return model, torch.randn(16, width), torch.randint(0, width, (16,))


def large() -> Model:
    """2048-9216-9216-10, 104 million parameters, with 32 samples."""
    torch.manual_seed(0)
    return mlp(2048, 9216, CLASSES), torch.randn(32, 2048), torch.randint(0, CLASSES, (32,))
