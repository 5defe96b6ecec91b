"""What ordinary training adds to a model, beside plain torch: precision, accumulation, adapters, recipes."""

from __future__ import annotations

from typing import Any

import pytest
import timm.optim
import torch
import torch.nn.functional as F
from models import BATCH_NORM, batch, build, loss
from real_training import SAMPLES, STEPS, Run, assert_same, by_mesh, by_torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from spmd import (
    P,
    data_parallel,
    ema,
    functional,
    functional_with_buffers,
    mean_of,
    optimizer,
    spmd,
    value_and_grad,
)

RATE = 1e-2
ROUNDING = {"rtol": 2e-2, "atol": 2e-3}  # of bfloat16, in other orders of the sums


def by_sgd(name: str, module: nn.Module, **options: Any) -> Run:
    return by_torch(name, module, torch.optim.SGD(module.parameters(), lr=RATE), **options)


def sgd(**options: Any) -> Any:
    return optimizer(torch.optim.SGD, lr=RATE, **options)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_autocast_around_the_call(name: str, real_mesh: Any) -> None:
    expected = by_sgd(name, build(name).float(), casting=True)
    assert_same(name, by_mesh(name, build(name).float(), sgd(), real_mesh(2), casting=True), expected, near=ROUNDING)
    full = by_sgd(name, build(name).float())
    assert full.losses[0] != expected.losses[0]


@pytest.mark.parametrize("name", ["gpt2", "convnext"])
def test_accumulation(name: str, real_mesh: Any) -> None:
    """Six virtual shards on two ranks, of seven samples: three backward passes on each."""
    expected = by_sgd(name, build(name))
    assert_same(name, by_mesh(name, build(name), sgd(), real_mesh(2), shards=6), expected)


def test_padding_of_a_causal_model(real_mesh: Any) -> None:
    """Transformers sums over tokens if it is told by what to divide; `mean_of` divides by their number in the batch."""
    module = build("gpt2").float()
    apply, params = functional(module)
    tokens = batch("gpt2", SAMPLES)["input_ids"]
    padding = torch.arange(tokens.shape[1]) >= 2 + torch.arange(SAMPLES)[:, None] % 5
    inputs = {"input_ids": tokens, "attention_mask": (~padding).long(), "labels": tokens.masked_fill(padding, -100)}
    expected = module(**inputs).loss
    expected.backward()

    def loss_fn(params: Any, batch: Any) -> Any:
        return mean_of(apply(params, **batch, num_items_in_batch=1).loss, (batch["labels"][:, 1:] != -100).sum())

    step = spmd(data_parallel(lambda params, batch: value_and_grad(loss_fn)(params, batch)), mesh=real_mesh(2))
    value, gradients = step(params, inputs)
    torch.testing.assert_close(value.full(), expected.detach())
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[key].full(), parameter.grad, msg=key)


@pytest.mark.parametrize("name", sorted(BATCH_NORM))
def test_batch_norm_of_the_whole_batch(name: str, real_mesh: Any) -> None:
    """Also timm's norms that have their activation in them."""
    module, inputs = build(name).train(), batch(name, SAMPLES)
    apply, params, buffers = functional_with_buffers(module, sync=True)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(params, buffers, batch["pixel_values"])
        return F.cross_entropy(out, batch["labels"]), buffers

    @spmd(mesh=real_mesh(2))
    @data_parallel
    def step(params: Any, buffers: Any, batch: Any) -> Any:
        return value_and_grad(loss_fn, has_aux=True)(params, buffers, batch)

    (value, buffers), gradients = step(params, buffers, inputs)
    expected = loss(name, module, inputs)
    expected.backward()
    torch.testing.assert_close(value.full(), expected.detach())
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[key].full(), parameter.grad, msg=key)
    for key, buffer in module.named_buffers():
        torch.testing.assert_close(buffers[key].full(), buffer, msg=key)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters(name: str) -> nn.Module:
    module = build(name).requires_grad_(False)
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, Adapted):
                setattr(parent, key, Adapted(child))
    return module


@pytest.mark.parametrize("name", ["bert", "vit (timm)"])
def test_low_rank_adapters_of_a_frozen_model(name: str, real_mesh: Any) -> None:
    module = with_adapters(name)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = {key: value.detach().clone() for key, value in module.named_parameters()}
    expected = by_torch(name, module, torch.optim.SGD(trained, lr=RATE))
    found = by_mesh(name, with_adapters(name), sgd(), real_mesh(2))
    assert_same(name, found, expected)
    changed = {key for key, value in found.params.items() if not torch.equal(value, before[key])}
    assert changed and all("up." in key or "down." in key for key in changed)


# -- recipes of the optimizer ------------------------------------------------------------------------------------------


def is_flat(key: str, value: Tensor) -> bool:
    return value.dim() < 2


@pytest.mark.parametrize("name", ["llama", "vit (timm)"])
def test_groups_schedule_clip_and_average(name: str, real_mesh: Any) -> None:
    """No decay for biases and norms, a cosine schedule, clipping to a norm, an average of parameters: all at once."""
    module = build(name)
    named = list(module.named_parameters())
    opt = torch.optim.AdamW(
        [
            {"params": [value for key, value in named if is_flat(key, value)], "weight_decay": 0.0},
            {"params": [value for key, value in named if not is_flat(key, value)]},
        ],
        lr=RATE,
        weight_decay=0.1,
    )
    schedule = CosineAnnealingLR(opt, T_max=STEPS)
    average = {key: value.detach().clone() for key, value in named}

    @torch.no_grad()
    def after_step() -> None:
        schedule.step()
        for key, value in named:
            average[key].lerp_(value, 0.25)

    norms = []
    expected = by_torch(
        name,
        module,
        opt,
        before_step=lambda: norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1)),
        after_step=after_step,
    )
    assert min(norms) > 0.1  # or nothing was clipped

    ours = ema(
        optimizer(
            torch.optim.AdamW,
            lr=RATE,
            weight_decay=0.1,
            groups=[{"params": is_flat, "weight_decay": 0.0}],
            schedule=lambda opt: CosineAnnealingLR(opt, T_max=STEPS),
            clip=0.1,
        ),
        decay=0.75,
    )
    found = by_mesh(name, build(name), ours, real_mesh(2))
    assert_same(name, found, expected)
    averaged = {key: value.full() for key, value in found.state["ema"].items()}
    assert_same(name, Run([], averaged), Run([], average))


@pytest.mark.parametrize("cls", [timm.optim.Lamb, timm.optim.Adan])
def test_optimizers_of_timm(cls: type[torch.optim.Optimizer], real_mesh: Any) -> None:
    """Some count their steps in their groups, some clip by the norm of the gradients of all groups."""
    module = build("vit (timm)")
    named = list(module.named_parameters())
    groups = [[value for key, value in named if is_flat(key, value) is flat] for flat in (False, True)]
    opt = cls([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=RATE, weight_decay=0.1)
    expected = by_torch("vit (timm)", module, opt)
    ours = optimizer(cls, lr=RATE, weight_decay=0.1, groups=[{"params": is_flat, "weight_decay": 0.0}])
    found = by_mesh("vit (timm)", build("vit (timm)"), ours, real_mesh(2))
    assert_same("vit (timm)", found, expected, near={"rtol": 1e-7, "atol": 1e-7})


# -- the classes of transformers ---------------------------------------------------------------------------------------


def test_its_own_classes_in_and_out(real_mesh: Any) -> None:
    """A `BatchEncoding` as a tokenizer gives it is split; a `ModelOutput` comes back, with the rows of all samples."""
    module = build("bert")
    inputs = BatchEncoding(dict(batch("bert", SAMPLES)))
    expected = module(**inputs)
    apply, params = functional(module)
    mesh = real_mesh(2)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, batch: Any) -> Any:
        assert isinstance(batch, BatchEncoding)
        assert len(batch["labels"]) < SAMPLES
        return value_and_grad(lambda params, batch: apply(params, **batch).loss)(params, batch)

    value, gradients = step(params, inputs)
    torch.testing.assert_close(value.full(), expected.loss.detach())
    expected.loss.backward()
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[key].full(), parameter.grad)

    @spmd(mesh=mesh, out_specs=P("data"))
    @data_parallel
    def evaluate(params: Any, batch: Any) -> Any:
        return apply(params, input_ids=batch["input_ids"])

    output = evaluate(params, inputs)
    assert isinstance(output, SequenceClassifierOutput)
    torch.testing.assert_close(output.logits.full(), expected.logits.detach())


def test_hidden_states_on_the_ranks(real_mesh: Any) -> None:
    """Transformers records them only of classes of which it has made one in the process."""
    module, inputs = build("llama"), batch("llama", SAMPLES)
    apply, params = functional(module)
    module.requires_grad_(False)

    @spmd(mesh=real_mesh(2))
    @data_parallel
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            taught = module(**batch, output_hidden_states=True).hidden_states
            states = apply(params, **batch, output_hidden_states=True).hidden_states
            return sum((state.square() * other).mean() for state, other in zip(states, taught, strict=True))

        return value_and_grad(loss_fn)(params)[0]

    value = step(params, inputs)
    states = module(**inputs, output_hidden_states=True).hidden_states
    assert len(states) == 3
    torch.testing.assert_close(value.full(), sum((state.square() * state).mean() for state in states).detach())
