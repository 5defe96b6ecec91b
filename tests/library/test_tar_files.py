"""`Stream.tar`: what `tarfile` finds in a file, whoever has written it, and from any position on."""

import io
import random
import sys
import tarfile
from pathlib import Path

import cloudpickle
import pytest
import torch

from spmd import Loader, Stream

cloudpickle.register_pickle_by_value(sys.modules[__name__])
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def write(path: Path, kind: str, names: list[str], *, times: bool = False, links: bool = False) -> None:
    numbers = random.Random(0)
    with tarfile.open(path, "w", format=FORMATS[kind]) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            data = numbers.randbytes(numbers.choice([1, 511, 512, 513, 3000]))
            about = tarfile.TarInfo(name)
            about.size, about.mtime = len(data), 1700000000.25 if times else 0
            tar.addfile(about, io.BytesIO(data))
            if links:
                link = tarfile.TarInfo(f"{name}.link")
                link.type, link.linkname = tarfile.SYMTYPE, name
                tar.addfile(link)


def read_by_tarfile(path: Path) -> list[list[int]]:
    with tarfile.open(path) as tar:
        return [summed(member.name, tar.extractfile(member).read()) for member in tar if member.isfile()]


def summed(name: str, data: bytes) -> list[int]:
    stem = name.removesuffix(".bin")
    return [len(stem), sum(map(ord, stem)), len(data), sum(data)]


def read_by_stream(path: Path) -> Stream:
    return Stream.tar([path]).map(lambda sample: torch.tensor(summed(sample["__key__"], sample["bin"])))


PLAIN = [f"folder/{number:03}.bin" for number in range(9)]
LONG = [f"folder/{'d' * 60}/{'e' * 60}/{number}.bin" for number in range(3)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (PLAIN, {}),
        (PLAIN, {"times": True}),
        (PLAIN, {"links": True}),
        ([*PLAIN, *LONG, "folder/ü.bin", "folder/z.bin"], {"times": True}),
    ],
    ids=["plain", "times", "links", "long names"],
)
def test_what_tarfile_finds_from_any_position(shared_mesh, tmp_path, kind, names, options):
    path, mesh = tmp_path / "samples.tar", shared_mesh({"data": 1})
    write(path, kind, names, **options)
    expected = read_by_tarfile(path)
    assert len(expected) == len(names)
    loader = Loader(read_by_stream(path), 1, mesh=mesh)
    states = [(batch.full()[0].tolist(), loader.state_dict()) for batch in loader]
    assert [sample for sample, _ in states] == expected
    for at in (0, len(names) // 2, len(names) - 2):
        loader.load_state_dict(states[at][1])
        assert [batch.full()[0].tolist() for batch in loader] == expected[at + 1 :]


def test_a_file_that_ends_within_a_member_is_refused(shared_mesh, tmp_path):
    path, mesh = tmp_path / "samples.tar", shared_mesh({"data": 1})
    write(path, "gnu", PLAIN)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(tarfile.ReadError, match="unexpected end of data"):
        list(Loader(read_by_stream(path), 1, mesh=mesh))


@pytest.mark.parametrize("kind", ["plain", "links"])
def test_a_damaged_header_is_not_the_end(shared_mesh, tmp_path, kind):
    """For `tarfile` alone it is, if it is not the first."""
    path, mesh = tmp_path / "samples.tar", shared_mesh({"data": 1})
    write(path, "gnu", PLAIN, links=kind == "links")
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1].offset
    whole = path.read_bytes()
    for damaged in (whole[: last + 200], whole[:last] + b"damage" + whole[last + 6 :]):
        path.write_bytes(damaged)
        with pytest.raises(tarfile.ReadError, match=f"header at byte {last} is damaged"):
            list(Loader(read_by_stream(path), 1, mesh=mesh))
    path.write_bytes(whole.rstrip(b"\0").ljust(len(whole) - len(whole) % 512, b"\0"))
    assert len(list(Loader(read_by_stream(path), 1, mesh=mesh))) == len(PLAIN)
