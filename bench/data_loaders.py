"""Samples per second of data loaders: this one, torch's, Grain and Hugging Face `datasets`, in turns of one run.

    python bench/data_loaders.py [memory|memmap|parquet|tar ...] > bench/results/data_loaders.txt

Two ranks each, batches of 128 samples a rank, shuffled. Nothing is computed with them. Peers that are not installed are
named and left out. Each figure is the median of the rounds, with their range.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

RANKS, BATCH, ROUNDS, SECONDS = 2, 128, 5, 1.5
REST_SECONDS = 10.0  # at most, between two turns
TOGETHER = 4  # batches that ranks read until they ask each other whether a turn is over
WIDTH, ROWS = 784, 60_000  # of the tensors in memory
MAPPED = 2 * 10**9 // (4 * WIDTH)  # rows of the mapped file
COLUMNS, SIDE, CROP = 16, 96, 80
AHEAD = 16  # batches that the driver may have read ahead, besides the default
PEERS = {
    "spmd": "spmd, from a driver",
    "spmd ahead": f"spmd, from a driver, prefetch={AHEAD}",
    "spmd launched": "spmd, in launched ranks",
    "torch": "torch DataLoader + DistributedSampler",
    "torch batched": "torch DataLoader, index lists as its sampler",
    "grain": "Grain",
    "datasets": "Hugging Face datasets",
}
CASES = {
    "memory": "tensors in memory, 784 float32 and a label",
    "memmap": "a mapped file of 2 GB, rows of 784 float32 at random",
    "parquet": "Parquet, 16 columns of float32 and a label, 8 files, a shuffle window of 1000",
    "tar": "tar files of PNGs of 96 x 96, decoded, cropped, flipped, in one worker a rank",
}


# -- data ------------------------------------------------------------------------------------------------------------


def write(folder: Path, cases: list[str]) -> None:
    numbers = np.random.default_rng(0)
    if "memmap" in cases:
        with open(folder / "mapped.bin", "wb") as file:
            file.truncate(MAPPED * WIDTH * 4)  # a hole, which reads as zeros
        np.memmap(folder / "mapped.bin", np.uint8, "r")[::4096].sum()  # into the cache, for all alike
    if "parquet" in cases:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        for part in range(8):
            columns = {f"x{i}": numbers.random(20_000, dtype=np.float32) for i in range(COLUMNS)}
            table = pyarrow.table({**columns, "y": np.arange(20_000) % 10})
            parquet.write_table(table, folder / f"{part}.parquet", row_group_size=5000)
    if "tar" in cases:
        image = importlib.import_module("PIL.Image")
        for part in range(8):
            with tarfile.open(folder / f"{part}.tar", "w") as tar:
                for index in range(200):
                    noise = (
                        numbers.integers(0, 255, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
                    )
                    data = io.BytesIO()
                    image.fromarray(noise).save(data, "png")
                    for extension, content in (("png", data.getvalue()), ("cls", str(index % 10).encode())):
                        about = tarfile.TarInfo(f"{part}{index:04}.{extension}")
                        about.size = len(content)
                        tar.addfile(about, io.BytesIO(content))


def rows(folder: Path, case: str) -> dict[str, np.ndarray]:
    """The arrays that are indexed by sample."""
    if case == "memmap":
        return {"x": np.memmap(folder / "mapped.bin", np.float32, "r", shape=(MAPPED, WIDTH))}
    return {"x": np.random.default_rng(0).random((ROWS, WIDTH), dtype=np.float32), "y": np.arange(ROWS) % 10}


def decoded(sample: dict[str, bytes]) -> dict[str, Any]:
    """A PNG as a tensor: a random part of it, flipped or not."""
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(sample["png"])))
    top, left = np.random.randint(0, SIDE - CROP, 2)
    pixels = pixels[top : top + CROP, left : left + CROP]
    if np.random.rand() < 0.5:
        pixels = pixels[:, ::-1]
    return {"x": torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1) / 255.0, "y": int(sample["cls"])}


def members(paths: list[Path]) -> Iterator[dict[str, bytes]]:
    """The samples of tar files, as a user of torch reads them."""
    for path in paths:
        with tarfile.open(path) as tar:
            while (image := tar.next()) is not None:
                label = tar.next()
                yield {"png": tar.extractfile(image).read(), "cls": tar.extractfile(label).read()}  # type: ignore


def paths_of(folder: Path, case: str) -> list[Path]:
    return sorted(folder.glob(f"*.{case}"))


# -- contenders: epochs without end of a rank's batches ----------------------------------------------------------------


def mesh_of(case: str, folder: Path, rank: int | None) -> Any:
    """The mesh of a driver, or that of a launched rank."""
    from spmd import Mesh, initialize

    if rank is not None:
        initialize(rank, RANKS, init_method=f"file://{folder}/meet {case}")
    return Mesh({"data": RANKS})


def by_spmd(case: str, folder: Path, mesh: Any, **options: int) -> Iterator[int]:
    """The number of samples of each batch: in the driver over all ranks, in a launched rank its share."""
    from spmd import Loader, Stream

    share = 1 if mesh.is_driver else RANKS
    if case in ("memory", "memmap"):
        data: Any = rows(folder, case)
        loader = Loader(data, BATCH * RANKS, mesh=mesh, **options)
    elif case == "parquet":
        stream = Stream.parquet(paths_of(folder, case)).shuffle(1000)
        loader = Loader(stream, BATCH * RANKS, mesh=mesh, shards=8, **options)
    else:
        stream = Stream.tar(paths_of(folder, case)).shuffle(100).map(decoded)
        loader = Loader(stream, BATCH * RANKS, mesh=mesh, shards=8, workers=1)
    while True:
        for batch in loader:
            yield (batch["x"] if "x" in batch else batch["y"]).shape[0] // share


def by_torch(case: str, folder: Path, rank: int, batched: bool = False) -> Iterator[int]:
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

    class Forward(IterableDataset):
        """This rank's files, read by one process, shuffled in a buffer."""

        def __iter__(self) -> Iterator[Any]:
            paths = paths_of(folder, case)[rank::RANKS]
            if case == "tar":
                yield from map(decoded, shuffled(members(paths), 100))
                return
            parquet = importlib.import_module("pyarrow.parquet")
            groups = (group for path in paths for group in parquet.ParquetFile(path).iter_batches(5000))
            yield from shuffled((row for group in groups for row in group.to_pylist()), 1000)

    class Mapped(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.arrays = rows(folder, case)

        def __len__(self) -> int:
            return len(self.arrays["x"])

        def __getitem__(self, index: Any) -> Any:
            return {name: torch.as_tensor(np.array(array[index])) for name, array in self.arrays.items()}

    if case in ("memory", "memmap"):
        dataset: Any = Mapped()
        if case == "memory" and not batched:
            dataset = TensorDataset(*map(torch.from_numpy, dataset.arrays.values()))
        sampler: Any = DistributedSampler(dataset, RANKS, rank)
        options: dict[str, Any] = {"batch_size": BATCH, "sampler": sampler}
        if batched:
            options = {"batch_size": None, "sampler": BatchSampler(sampler, BATCH, False)}
        loader = DataLoader(dataset, **options)
    else:
        loader = DataLoader(Forward(), BATCH, num_workers=int(case == "tar"), persistent_workers=case == "tar")
    for _ in itertools.count():
        for batch in loader:
            yield len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def shuffled(records: Iterator[Any], window: int) -> Iterator[Any]:
    """As WebDataset and datasets do it: for each record that comes, a random one of a buffer is given."""
    held = list(itertools.islice(records, window))
    for record in records:
        at = np.random.randint(len(held))
        held[at], given = record, held[at]
        yield given
    yield from held


def by_grain(case: str, folder: Path, rank: int) -> Iterator[int]:
    import grain
    from absl import flags

    flags.FLAGS(["bench"])  # its workers want them

    class Rows:
        def __init__(self) -> None:
            self.arrays = rows(folder, case)

        def __len__(self) -> int:
            return len(self.arrays["x"])

        def __getitem__(self, index: int) -> Any:
            return {name: array[index] for name, array in self.arrays.items()}

    if case == "parquet":
        files = grain.MapDataset.source([str(path) for path in paths_of(folder, case)[rank::RANKS]])
        read = files.map(grain.experimental.ParquetIterDataset)
        made = grain.experimental.InterleaveIterDataset(read, cycle_length=1)
        made = grain.experimental.WindowShuffleIterDataset(made, window_size=1000, seed=0)
        made = made.batch(BATCH)
    elif case == "tar":
        source = list(members(paths_of(folder, case)))  # Grain has no reader of tar files: its records, read before
        samples = grain.MapDataset.source(source).shuffle(seed=0)[rank::RANKS].map(as_arrays).batch(BATCH)
        made = samples.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    else:
        made = grain.MapDataset.source(Rows()).shuffle(seed=0)[rank::RANKS].batch(BATCH).to_iter_dataset()
    for _ in itertools.count():
        for batch in made:
            yield len(next(iter(batch.values())))


def as_arrays(sample: dict[str, bytes]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in decoded(sample).items()}


def by_datasets(case: str, folder: Path, rank: int) -> Iterator[int]:
    import datasets
    from datasets.distributed import split_dataset_by_node

    datasets.disable_progress_bars()
    if case == "memory":
        whole: Any = datasets.Dataset.from_dict(dict(rows(folder, case))).with_format("torch")
        for epoch in itertools.count():
            for batch in split_dataset_by_node(whole, rank, RANKS).shuffle(seed=epoch).iter(BATCH):
                yield len(batch["x"])
    kind = {"parquet": "parquet", "tar": "webdataset"}[case]
    files = [str(path) for path in paths_of(folder, case)]
    streamed: Any = datasets.load_dataset(kind, data_files=files, streaming=True, split="train")
    if case == "tar":
        streamed = streamed.cast_column("png", datasets.Image(decode=False))
    mine = split_dataset_by_node(streamed, rank, RANKS).shuffle(seed=0, buffer_size=1000 if case == "parquet" else 100)
    if case == "tar":
        loader = torch.utils.data.DataLoader(mine.map(of_datasets), BATCH, num_workers=1, persistent_workers=True)
        while True:
            yield from (len(batch["x"]) for batch in loader)
    while True:
        yield from (len(batch["y"]) for batch in mine.with_format("torch").iter(BATCH))


def of_datasets(sample: dict[str, Any]) -> dict[str, Any]:
    return decoded({"png": sample["png"]["bytes"], "cls": str(sample["cls"]).encode()})


# -- turns -----------------------------------------------------------------------------------------------------------


def contend(peer: str, case: str, folder: Path, rank: int) -> None:
    """In a process of a contender: read for so many seconds whenever a line asks for it."""
    torch.set_num_threads(1)
    mesh = mesh_of(case, folder, rank if peer == "spmd launched" else None) if peer.startswith("spmd") else None
    made: dict[str, Callable[[], Iterator[int]]] = {
        "spmd": lambda: by_spmd(case, folder, mesh),
        "spmd ahead": lambda: by_spmd(case, folder, mesh, prefetch=AHEAD),
        "spmd launched": lambda: by_spmd(case, folder, mesh),
        "torch": lambda: by_torch(case, folder, rank),
        "torch batched": lambda: by_torch(case, folder, rank, batched=True),
        "grain": lambda: by_grain(case, folder, rank),
        "datasets": lambda: by_datasets(case, folder, rank),
    }
    counts = made[peer]()
    together = mesh if peer == "spmd launched" and case in ("parquet", "tar") else None
    for _ in range(4):
        next(counts)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        began, samples = time.perf_counter(), 0
        while not over(together, (passed := time.perf_counter() - began) > float(line)):
            samples += sum(itertools.islice(counts, 1 if together is None else TOGETHER))
        print(json.dumps(samples / passed), flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)  # nothing is left to say, and some readers' threads do not end


def over(mesh: Any, mine: bool) -> bool:
    """Whether a turn is over; ranks that read a stream's batches together end it together, as soon as one would."""
    if mesh is None:
        return mine
    flag = torch.tensor([int(mine)])
    mesh.comm().all_reduce(flag)
    return bool(flag)


def left_out(peer: str, case: str) -> str | None:
    module = {"grain": "grain", "datasets": "datasets"}.get(peer)
    if module is not None and importlib.util.find_spec(module) is None:
        return "not installed"
    if case == "memmap" and peer == "datasets":
        return "reads Arrow files, not arrays"
    if peer == "spmd ahead" and case == "tar":
        return "as above: a worker of each rank reads ahead anyway"
    if peer == "torch batched" and case in ("parquet", "tar"):
        return "as above: records come one after another"
    return None


def measured(case: str, folder: Path) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    sides: dict[str, list[subprocess.Popen]] = {}
    for peer in PEERS:
        why = left_out(peer, case)
        if why is not None:
            found[peer] = why
            continue
        begin = [sys.executable, __file__, "--contend", peer, "--case", case, "--folder", str(folder), "--rank"]
        count = 1 if peer in ("spmd", "spmd ahead") else RANKS
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        sides[peer] = [subprocess.Popen([*begin, str(rank)], **pipes) for rank in range(count)]
        if [heard(process) for process in sides[peer]] != ["ready"] * count:
            found[peer] = "failed"
            del sides[peer]
    for _ in range(ROUNDS):
        for peer, processes in sides.items():
            for process in processes:
                process.stdin.write(f"{SECONDS}\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            rates = found.setdefault(peer, [])
            assert isinstance(rates, list)
            rates.append(sum(heard(process) for process in processes))
            come_to_rest()
    for process in itertools.chain(*sides.values()):
        process.stdin.close()  # type: ignore[union-attr]
    for process in itertools.chain(*sides.values()):
        process.wait()
    return found


def come_to_rest() -> None:
    """Wait for contenders that read ahead after their turn, Grain above all, lest they take the next one's cores."""
    end = time.monotonic() + REST_SECONDS
    while time.monotonic() < end:
        before = idle_ticks()
        time.sleep(0.2)
        if (idle_ticks() - before) / (0.2 * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)) > 0.9:
            return


def idle_ticks() -> int:
    """Idle time of all cores so far, as the kernel counts it."""
    return int(Path("/proc/stat").read_text().split(maxsplit=5)[4])


def heard(process: subprocess.Popen) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline() or "null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; none is all")
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend is not None:
        contend(given.contend, given.case, given.folder, given.rank)
        return
    cases = given.cases or list(CASES)
    names = ["torch", *(name for name in ("grain", "datasets", "pyarrow") if importlib.util.find_spec(name))]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}; {RANKS} ranks, {BATCH} samples each;"
    )
    print(f"medians of {ROUNDS} rounds of {SECONDS} s in turns, and their range", flush=True)
    with tempfile.TemporaryDirectory() as made:
        write(Path(made), cases)
        for case in cases:
            print(f"\n{CASES[case]}", flush=True)
            found = measured(case, Path(made))
            ours = max(
                (rates for peer, rates in found.items() if peer.startswith("spmd") and not isinstance(rates, str)),
                key=statistics.median,
            )
            for peer, rates in found.items():
                if isinstance(rates, str):
                    print(f"  {PEERS[peer]:<46} {rates}", flush=True)
                    continue
                median = statistics.median(rates)
                ratio = "" if peer.startswith("spmd") else f"   ours: {statistics.median(ours) / median:.2f} times"  # type: ignore
                print(
                    f"  {PEERS[peer]:<46} {median:>9,.0f} samples/s ({min(rates):,.0f} to {max(rates):,.0f}){ratio}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
