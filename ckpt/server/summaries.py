"""What the catalogue keeps of a manifest: made alike by clients that save and by indexing."""

from __future__ import annotations

import math

from ckpt.manifest import Manifest
from ckpt.metrics import recorded_metrics
from ckpt.server.messages import MeshMessage, OwnerMessage, ParentMessage, Summary
from ckpt.summary import OwnerSummary, summarize_owners

MAX_OWNERS = 4096


def summary_of(manifest: Manifest) -> Summary:
    """The summary of a committed manifest."""
    owners = [summarize_owners(entry) for entry in manifest.ownership]
    # Of several optimizers the one that carries most is shown; it is what balance is about.
    main = max(owners, key=lambda o: sum(load.cost for load in o.loads), default=None)
    parent = manifest.parent
    return Summary(
        sha256=manifest.sha256,
        created=manifest.created,
        bytes=sum(file.size for file in (*manifest.files, *manifest.indexes)),
        tensors=len(manifest.tensors),
        files=len(manifest.files) + len(manifest.indexes),
        world_size=manifest.topology.world_size,
        meshes=tuple(
            MeshMessage(names=mesh.names, sizes=mesh.sizes) for mesh in manifest.topology.meshes
        ),
        replica_count=None if main is None else main.replica_count,
        imbalance=None if main is None else main.imbalance,
        owners=() if main is None else _owners(main),
        producer={key: value for key, value in manifest.producer.items() if len(key) <= 256},
        parent=None
        if parent is None
        else ParentMessage(path=parent.path, step=parent.step, sha256=parent.sha256),
        metrics={
            name: value
            for name, value in recorded_metrics(manifest).items()
            if len(name) <= 256 and math.isfinite(value)
        },
    )


def _owners(summary: OwnerSummary) -> tuple[OwnerMessage, ...]:
    return tuple(
        OwnerMessage(owner=load.owner, slots=load.slots, share=min(load.share, 1.0))
        for load in summary.loads[:MAX_OWNERS]
    )
