"""The models that the benches train, with a batch of synthetic data each."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


class Encoder(nn.Module):
    """Six transformer layers of width 256 over sequences of 128, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def cnn() -> nn.Module:
    blocks: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        blocks += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


# name -> (makes the model, makes the inputs)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp-1k": (lambda: mlp(784, 1024, 10), lambda: torch.randn(128, 784)),
    "mlp-4k": (lambda: mlp(1024, 4096, 10), lambda: torch.randn(128, 1024)),
    "encoder": (Encoder, lambda: torch.randn(8, 128, 256)),
    "cnn": (cnn, lambda: torch.randn(128, 3, 32, 32)),
}


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its inputs and its labels, the same in every process."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    x = inputs()
    return model(), x, torch.randint(0, 10, (len(x),))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)
