"""The members of a tar file, read forwards.

Common headers are parsed here, since `tarfile` takes as long for one as decoding a small image does; from the first
uncommon header on, `tarfile` reads the rest. Invariant: names, contents and offsets are those that `tarfile` alone
would give.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

_BLOCK = tarfile.BLOCKSIZE
_FILE, _FOLDER, _MORE = b"0", b"5", b"x"  # kinds of headers
_TIMES = {b"mtime", b"atime", b"ctime"}  # fields of `_MORE` that a sample has no use for


def members(file: Any) -> Iterator[tuple[int, str, bytes]]:
    """(offset, name, content) of the files in a tar file, from its current position on."""
    while True:
        begin, header = file.tell(), file.read(_BLOCK)
        kind, size = _kind_and_size(header)
        if kind == _MORE and _is_of_times(_content(file, size) or b""):
            header = file.read(_BLOCK)
            kind, size = _kind_and_size(header)
        if kind == _FOLDER and size == 0:
            continue
        content = _content(file, size) if kind == _FILE else None
        if content is None:
            break
        yield begin, _name(header), content
    file.seek(begin)
    tar: Any = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
    while (member := tar.next()) is not None:
        tar.members.clear()  # or it keeps them all
        if member.isfile():
            yield member.offset, member.name, tar.extractfile(member).read()
    file.seek(tar.offset)
    if file.read(_BLOCK).strip(b"\0"):  # `tarfile` takes it for the end
        raise tarfile.ReadError(f"the header at byte {tar.offset} is damaged, or not all there")
    tar.close()


def _kind_and_size(header: bytes) -> tuple[bytes, int]:
    """What a header is for, and how long what follows is; the kind is empty if it is not one of the usual."""
    try:
        size, checksum = _number(header[124:136]), _number(header[148:156])
    except ValueError:
        return b"", 0
    usual = len(header) == _BLOCK and header[257:262] == b"ustar" and size >= 0
    fits = usual and checksum == sum(header) - sum(header[148:156]) + 8 * ord(" ")
    return (header[156:157], size) if fits else (b"", 0)


def _number(field: bytes) -> int:
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _content(file: Any, size: int) -> bytes | None:
    """What follows a header; None if the file ends within."""
    blocks: bytes = file.read(-(-size // _BLOCK) * _BLOCK)
    return blocks[:size] if len(blocks) >= size and len(blocks) % _BLOCK == 0 else None


def _is_of_times(content: bytes) -> bool:
    """Whether an extended header, lines such as `30 mtime=1700000000.123`, has nothing but times."""
    return bool(content) and _TIMES.issuperset(
        line.partition(b" ")[2].partition(b"=")[0] for line in content.splitlines()
    )


def _name(header: bytes) -> str:
    name, prefix = (
        part.partition(b"\0")[0].decode(tarfile.ENCODING, "surrogateescape") for part in (header[:100], header[345:500])
    )
    return f"{prefix}/{name}" if prefix else name
