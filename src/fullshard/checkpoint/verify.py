"""Verification: every file of a checkpoint has the bytes and the hash that its manifest says."""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.format import Manifest, hash_file, read_manifest
from fullshard.errors import CheckpointError


def verify_checkpoint(folder: Path) -> Manifest:
    """Read the manifest and hash every file. CheckpointError names the first bad one."""
    manifest = read_manifest(folder)
    for name, facts in manifest.files.items():
        found = hash_file(folder / name)
        if found != facts["blake2b"]:
            raise CheckpointError(
                f"{folder / name} is damaged: its hash is {found}, the manifest says {facts['blake2b']}.",
                "Use another step: fullshard resume RUN --step N",
            )
    return manifest
