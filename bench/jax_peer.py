"""The same train steps in plain jax.numpy: `shard_map` over host devices of one process, AdamW by hand.

Parameters start as those of the torch models. Arguments are donated. Compiling is not counted: a turn's first step runs
before its clock starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd.cli.bench.contenders import Step, made

Params = dict[str, jax.Array]


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}weight"].T + params[f"{name}bias"]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    for layer in ("0.", "2."):
        x = jax.nn.relu(linear(params, layer, x))
    return linear(params, "4.", x)


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * params[f"{name}weight"] + params[f"{name}bias"]


def attention(params: Params, name: str, x_BTD: jax.Array, heads: int) -> jax.Array:
    b, t, d = x_BTD.shape
    qkv = x_BTD @ params[f"{name}in_proj_weight"].T + params[f"{name}in_proj_bias"]
    q, k, v = (part.reshape(b, t, heads, d // heads) for part in jnp.split(qkv, 3, axis=-1))
    out_BTHd = jax.nn.dot_product_attention(q, k, v)
    return linear(params, f"{name}out_proj.", out_BTHd.reshape(b, t, d))


def encoder(params: Params, x: jax.Array) -> jax.Array:
    for number in range(6):
        name = f"layers.layers.{number}."
        x = layer_norm(params, f"{name}norm1.", x + attention(params, f"{name}self_attn.", x, 4))
        hidden = jax.nn.relu(linear(params, f"{name}linear1.", x))
        x = layer_norm(params, f"{name}norm2.", x + linear(params, f"{name}linear2.", hidden))
    return linear(params, "head.", x.mean(1))


def cnn(params: Params, x: jax.Array) -> jax.Array:
    for number in (0, 3, 6):
        x = jax.lax.conv_general_dilated(x, params[f"{number}.weight"], (1, 1), "SAME")
        x = jax.nn.relu(x + params[f"{number}.bias"][:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return linear(params, "10.", x.reshape(len(x), -1))


FORWARD: dict[str, Callable[[Params, jax.Array], jax.Array]] = {
    "mlp_1k": mlp,
    "mlp_4k": mlp,
    "small": mlp,
    "encoder": encoder,
    "cnn": cnn,
}


def adamw(param: jax.Array, grad: jax.Array, m: jax.Array, v: jax.Array, count: jax.Array) -> tuple:
    """torch's defaults: betas (0.9, 0.999), eps 1e-8, weight decay 0.01, and the learning rate of all contenders."""
    lr, beta1, beta2 = 1e-3, 0.9, 0.999
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
    step = (m / (1 - beta1**count)) / (jnp.sqrt(v / (1 - beta2**count)) + 1e-8)
    return param * (1 - lr * 0.01) - lr * step, m, v


class Jax:
    """One process whose host devices, `--xla_force_host_platform_device_count` of them, are the ranks."""

    rank, threads = 0, 1  # the threads that the harness places; XLA places its own

    def __init__(self, rank: int, size: int, meeting: str):
        self.mesh = jax.make_mesh((len(jax.devices()),), ("data",))
        self.loss: Any = None

    def barrier(self) -> None:
        pass

    def finish(self) -> None:
        jax.block_until_ready(self.loss)

    def train_step(self, options: Mapping[str, Any], model: str | tuple) -> Step:
        module, x, y = made(model)
        forward = FORWARD[str(model).partition(":")[2]]
        replicated = NamedSharding(self.mesh, P())
        params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}

        def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
            log_probs = jax.nn.log_softmax(forward(params, x))
            return -jnp.take_along_axis(log_probs, y[:, None], 1).mean()

        @partial(jax.jit, donate_argnums=0)
        @partial(
            jax.shard_map, mesh=self.mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()), check_vma=False
        )
        def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
            params, m, v, count = state
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            loss, grads = jax.lax.pmean((loss, grads), "data")
            new = {name: adamw(params[name], grads[name], m[name], v[name], count + 1) for name in params}
            return (*({name: value[part] for name, value in new.items()} for part in range(3)), count + 1), loss

        zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
        state = jax.device_put((params, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(())), replicated)
        carried = [state]
        batch = jax.device_put((np.asarray(x), np.asarray(y)), NamedSharding(self.mesh, P("data")))

        def step() -> jax.Array:
            carried[0], self.loss = train_step(carried[0], *batch)
            return self.loss

        return step
