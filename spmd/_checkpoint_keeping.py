"""Which checkpoints of a directory stay when only the last few are kept.

Invariant: one that can be read is never removed in favour of one that can't.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from . import _checkpoint_files as files


def keep_last(path: Path, count: int, written: Path) -> None:
    """Remove all checkpoints but the `count` written last, and nothing that is no checkpoint.

    The one just `written` stays. One that can't be read doesn't count, and goes.
    """
    others = [
        folder
        for _, folder in files.steps(path)
        if folder != written and files.is_name(folder.name) and files.is_ours(folder)
    ]
    others.sort(key=_written_at, reverse=True)
    for folder in others[sum(map(_looks_whole, others[: count - 1])) :]:
        files.remove(folder)


def _written_at(folder: Path) -> tuple[bool, float, str]:
    with contextlib.suppress(OSError):
        if _looks_whole(folder):
            return True, (folder / files.MANIFEST).stat().st_mtime, folder.name
    return False, 0.0, folder.name


def _looks_whole(folder: Path) -> bool:
    """Whether the manifest is whole and the files are as long as it says; their checksums are not computed."""
    try:
        sealed = json.loads((folder / files.MANIFEST).read_bytes())
        whole = hashlib.sha256(json.dumps(sealed["manifest"]).encode()).hexdigest() == sealed["sha256"]
        return whole and all((folder / f["file"]).stat().st_size == f["bytes"] for f in sealed["manifest"]["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
