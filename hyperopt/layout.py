"""What a parameter's mesh and placements mean: replicas, shards, and the boxes that ranks hold.

The arithmetic is pure and lives in `hyperopt.ownership`; this module reads it off live tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyperopt.ownership import (
    Box,
    MeshSpec,
    Placement,
    local_boxes,
    replica_index,
    shard_index,
)
from hyperopt.sharing import shard_boxes


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh and placements of a parameter. `mesh` is None for a plain tensor that shares nothing."""

    mesh: MeshSpec | None
    placements: tuple[Placement, ...]

    def rank_table(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks as `[replica][shard]`; `((0,),)` stands in where there is no mesh.

        Replicas are numbered by their coordinates on the replicate dims, shards by those on all
        other dims, both row-major.
        """
        if self.mesh is None:
            return ((0,),)
        sizes = self.mesh.sizes
        table: dict[tuple[int, int], int] = {}
        for at, member in zip(self.mesh.coordinates(), self.mesh.ranks, strict=True):
            replica = replica_index(sizes, self.placements, at)
            table[replica, shard_index(sizes, self.placements, at)] = member
        replicas = 1 + max(replica for replica, _ in table)
        shards = len(table) // replicas
        return tuple(tuple(table[r, s] for s in range(shards)) for r in range(replicas))

    def shard_boxes(self, shape: tuple[int, ...]) -> tuple[tuple[Box, ...], ...]:
        """The boxes of a tensor of this shape that each shard holds, in shard order."""
        sizes = self.mesh.sizes if self.mesh is not None else ()
        return shard_boxes(shape, sizes, self.placements)


def layout_of(parameter: torch.Tensor, replicate_group: dist.ProcessGroup | None) -> Layout:
    """The layout of a parameter.

    A DTensor brings its own; a plain tensor is replicated over `replicate_group` (as under DDP), or
    shares nothing when there is none. Raises ValueError for a partial placement.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or tuple(f"dim_{i}" for i in range(mesh.ndim))
        ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
        spec = MeshSpec(tuple(names), tuple(mesh.mesh.shape), ranks)
        return Layout(spec, tuple(_placement(p) for p in parameter.placements))
    if replicate_group is None:
        return Layout(None, ())
    members = tuple(dist.get_process_group_ranks(replicate_group))
    return Layout(MeshSpec(("replicate",), (len(members),), members), (Placement(),))


def _placement(placement: object) -> Placement:
    if isinstance(placement, Replicate):
        return Placement()
    if isinstance(placement, Partial):
        raise ValueError(f"a parameter cannot be partial, found placement {placement}")
    split_factor = getattr(placement, "split_factor", 1)
    if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
        return Placement(int(placement.dim), int(split_factor))  # type: ignore[attr-defined]
    raise ValueError(f"unknown placement {placement!r}; known: Replicate, Shard and strided Shard")


def boxes_of_rank(parameter: torch.Tensor) -> tuple[Box, ...]:
    """The boxes of a parameter that this rank holds, in local row-major order; a plain tensor is
    held whole. None where the rank's part is empty or outside the mesh."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        whole = Box.whole(shape)
        return (whole,) if whole.elements else ()
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    placements = tuple(_placement(p) for p in parameter.placements)
    return local_boxes(shape, tuple(parameter.device_mesh.shape), placements, coordinate)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself. Call it with grad mode off."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local part with the parameter's mesh, placements and global shape around it."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """`(batch, rows, columns)` of the matrices that a parameter of this global shape means.

    Two dims are one matrix; a depthwise convolution `(A, 1, B)` is one matrix of A x B; any other
    shape is a batch over its leading dims. Raises ValueError below two dims.
    """
    if len(shape) < 2:
        raise ValueError(f"shape {shape} holds no matrix")
    if len(shape) == 3 and shape[1] == 1:
        return 1, shape[0], shape[2]
    batch = 1
    for size in shape[:-2]:
        batch *= size
    return batch, shape[-2], shape[-1]


def holds_whole_matrices(shape: tuple[int, ...], boxes: tuple[tuple[Box, ...], ...]) -> bool:
    """Whether every shard's boxes consist of whole matrices, so that no gathering is needed."""
    first_matrix_dim = 0 if len(shape) == 3 and shape[1] == 1 else len(shape) - 2
    inner = tuple(shape[first_matrix_dim:])
    return all(box.sizes[first_matrix_dim:] == inner for part in boxes for box in part)
