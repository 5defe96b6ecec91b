"""The random numbers of samples and batches: made of (seed, epoch, the sample's id), whoever reads them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..kernels.call import word_key
from ..mesh.readers import process
from ..mesh.region import seed_others


def seed(*key: Any) -> None:
    seed_generators(word_key("loader", *key))


def seed_generators(number: int) -> None:
    """Set the generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(number)
    seed_others(number)


@contextlib.contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """One thread, if bits must not depend on the number of ranks: the threads of a rank depend on it."""
    threads = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if wanted:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def own_random_numbers(wanted: bool = True) -> Iterator[None]:
    """Put the generators of torch, NumPy and Python back afterwards; not in a reader, where nobody else uses them."""
    if not wanted or process.note.kept:
        yield
        return
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
