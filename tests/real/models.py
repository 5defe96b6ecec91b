"""Small, randomly initialised models of well-known families, each with a batch and a loss; all in float64.

`build(name, dropout)` is a module; `batch(name, samples)` a tree of tensors; `loss(name, call, batch)` the mean over
the samples of what `call(**inputs)` returns, where `call` is the module or its functional form.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

CLASSES, TOKENS, WORDS = 5, 6, 50
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def _gpt2(dropout: float) -> nn.Module:
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = hf.GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, **rates)
    return hf.GPT2LMHeadModel(config)


def _llama(dropout: float) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, attention_dropout=dropout, **_SIZES))


def _bert(dropout: float) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = hf.BertConfig(vocab_size=WORDS, num_labels=CLASSES, max_position_embeddings=TOKENS, **_SIZES, **rates)
    return hf.BertForSequenceClassification(config)


def _t5(dropout: float) -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _vit_hf(dropout: float) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=CLASSES, **_SIZES, **rates)
    return hf.ViTForImageClassification(config)


def _timm(name: str, **options: Any) -> Callable[[float], nn.Module]:
    return lambda dropout: timm.create_model(name, num_classes=CLASSES, drop_rate=dropout, **options)


BUILDERS: dict[str, Callable[[float], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit (transformers)": _vit_hf,
    "resnet": _timm("resnet10t"),
    "convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
    "vit (timm)": _timm("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2),
    "efficientnet": _timm("efficientnet_lite0"),
}
# Transformers computes a part of these so, whatever the model is: language models' loss, the norms of Llama and T5.
IN_FLOAT32 = {"gpt2", "llama", "t5"}
_TEXT = {"gpt2", "llama", "bert", "t5"}
# Of the whole batch's statistics; `functional_with_buffers(sync=True)` has those, plain batch norm is each rank's own.
BATCH_NORM = {"resnet", "efficientnet"}


def build(name: str, dropout: float = 0.0, *, checkpointing: bool = False) -> nn.Module:
    torch.manual_seed(1)
    module = BUILDERS[name](dropout).double()
    module.train(name not in BATCH_NORM)
    if checkpointing and hasattr(module, "gradient_checkpointing_enable"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif checkpointing:
        module.set_grad_checkpointing(True)
    return module


def batch(name: str, samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name in _TEXT:
        found = {"input_ids": torch.randint(WORDS, (samples, TOKENS), generator=generator)}
        if name == "t5":
            found["labels"] = torch.randint(WORDS, (samples, TOKENS), generator=generator)
        if name == "bert":
            found["labels"] = torch.randint(CLASSES, (samples,), generator=generator)
        return found
    side = 16 if name.startswith("vit") else 32
    images = torch.randn(samples, 3, side, side, generator=generator, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def loss(name: str, call: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples, each of which counts the same."""
    if name in ("gpt2", "llama"):
        return call(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
    if name in ("bert", "t5", "vit (transformers)"):
        return call(**batch).loss
    return F.cross_entropy(call(batch["pixel_values"]), batch["labels"])
