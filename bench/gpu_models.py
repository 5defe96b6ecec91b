"""The models of the bench for GPUs: as large as GPT-2 small and as ResNet-50, and small ones of each kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """As large as GPT-2 small: 12 layers of width 768, 50,257 tokens."""

    def __init__(self, layers: int = 12, width: int = 768, tokens: int = 50257, length: int = 512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.last(self.blocks(self.tokens(x) + self.places(places)))).flatten(0, 1)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()

        def norm(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels, track_running_stats=False)  # a step without buffers

        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)),
        )
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.past(x))


def cnn(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """As large as ResNet-50: 16 bottlenecks."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not index else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def make(name: str, quick: bool = False, device: str = "cuda") -> tuple[nn.Module, Tensor, Tensor]:
    """A model with its inputs and labels."""
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer(*((2, 128, 1000, 64) if quick else ())).to(device, torch.bfloat16)
        shape, tokens = ((2, 64), 1000) if quick else ((8, 512), 50257)
        x = torch.randint(0, tokens, shape, device=device)
        return model, x, torch.randint(0, tokens, shape, device=device)
    model = cnn(*(((1, 1), 16, 10) if quick else ())).to(device)
    x = torch.randn(*((4, 3, 32, 32) if quick else (64, 3, 224, 224)), device=device)
    return model, x, torch.randint(0, 10, (len(x),), device=device)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels.flatten())
