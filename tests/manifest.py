"""Changes a checkpoint's manifest by hand: as older versions wrote it, or under other circumstances."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The manifest of the only checkpoint of a directory."""
    return json.loads(next(path.glob("*/checkpoint.json")).read_text())["manifest"]


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its checksum."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({"sha256": digest, "manifest": manifest}))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of the only checkpoint of a directory in place."""
    manifest = read(path)
    change(manifest)
    seal(next(path.glob("*/checkpoint.json")).parent, manifest)
