"""Reads `torch.save` files of whole state dicts, without torch and without running anything.

Where such a file was written from a checkpoint, it carries a record of it, and reads back as just
that. Of any other, each entry of the top-level dict is taken for an object that was saved: a dict
with `state` and `param_groups` is an optimizer, and a bare `model.state_dict()` is called `model`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CorruptError, IncompatibleError, UsageError
from ckpt.formats.record import decode_record, foreign_files, made_manifest, modified
from ckpt.formats.state_tree import find_leaves, state_tree
from ckpt.formats.target import RECORD_NAME
from ckpt.formats.torch_archive import RawTensor, TorchArchive
from ckpt.formats.torch_file import LAYOUT_NAME
from ckpt.manifest import ChunkEntry, GroupEntry, Index, Manifest, TensorEntry
from ckpt.state.values import encode_value, tagged
from ckpt.storage import Storage
from ckpt.topology import StateOf

MAX_SHARING = 16
"""How many times the bytes of a file its tensors may have together: tied tensors share bytes, but
a small file must not become an enormous checkpoint."""

_NUMBERS = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i", "bool": "<?"}


@dataclass(slots=True)
class StateFile:
    """What one file has: raw tensors by checkpoint key, which of them are optimizer state, groups
    and values as a manifest has them, and the record with its layout if there is one."""

    tensors: dict[str, RawTensor] = field(default_factory=dict)
    states: dict[str, StateOf] = field(default_factory=dict)
    groups: list[GroupEntry] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    record: Manifest | None = None
    layout: dict[str, Any] = field(default_factory=dict)


def read_torch(
    storage: Storage, name: str, parameter_order: Sequence[str] = ()
) -> tuple[Manifest, list[Index]]:
    """A checkpoint of one `torch.save` file; errors as `read_state_file`."""
    file = read_state_file(storage, name, parameter_order)
    tensors = {
        key: tensor_entry(raw, raw.sizes, file.states.get(key)) for key, raw in file.tensors.items()
    }
    chunks = (whole_chunk(key, name, raw) for key, raw in file.tensors.items())
    index = Index(0, tuple(chunk for chunk in chunks if chunk.byte_length))
    created, files = modified(storage, name), foreign_files(storage, [name])
    groups = tuple(file.groups)
    manifest = made_manifest(
        "torch.save", created, tensors, files, file.record, groups, file.extras
    )
    return manifest, [index]


def tensor_entry(raw: RawTensor, shape: tuple[int, ...], of: StateOf | None) -> TensorEntry:
    """A plain tensor as a manifest has it."""
    if of is None:
        return TensorEntry(raw.dtype, shape)
    return TensorEntry(
        raw.dtype,
        shape,
        optimizer=of.optimizer,
        parameter=of.parameter,
        state_key=of.state_key,
    )


def whole_chunk(key: str, name: str, raw: RawTensor) -> ChunkEntry:
    """A whole tensor as one chunk."""
    offset, length = raw.byte_offset, raw.byte_length
    zeros = (0,) * len(raw.sizes)
    return ChunkEntry(
        key, zeros, raw.sizes, name, offset, length, offset, length, raw.crc32, ""
    )  # fmt: skip


def read_state_file(storage: Storage, name: str, parameter_order: Sequence[str] = ()) -> StateFile:
    """Read the pickle of a file and sort what it says.

    `parameter_order` names the parameters of optimizers that number them: in the order in which
    they were given to the optimizer. UsageError where it is needed and missing; CorruptError for a
    damaged file, or one that would need code to load; IncompatibleError for tensors that are not
    contiguous, and for names that do not fit.
    """
    where = f"{storage.url}/{name}"
    size = storage.size(name)
    tree = TorchArchive(storage, name, 0, size).tree()
    if not isinstance(tree, dict):
        raise IncompatibleError(f"{where}: holds a {type(tree).__name__}, not a state dict")
    text, layout = tree.pop(RECORD_NAME, None), tree.pop(LAYOUT_NAME, {})
    if isinstance(text, str) and isinstance(layout, dict):
        file = _recorded(where, tree, decode_record(text, f"{where}: {RECORD_NAME}"))
    else:
        file = _Sorter(storage, name, parameter_order).sort(tree)
    file.layout = layout
    total = sum(raw.byte_length for raw in file.tensors.values())
    if total > MAX_SHARING * size:
        raise CorruptError(f"{where}: {size} bytes that claim to be {total} bytes of tensors")
    return file


def _recorded(where: str, tree: Mapping[str, Any], record: Manifest) -> StateFile:
    """The tensors of a file that was written from a checkpoint: where the record puts them."""
    by_number = any(
        isinstance(key, int)
        for optimizer in {group.optimizer for group in record.groups}
        for key in (tree.get(optimizer) or {}).get("state", {})
    )
    named = {key: _Key(key) for key in record.tensors}
    expected = state_tree(record, named, "index" if by_number else "fqn")
    file = StateFile(record=record)
    for path, leaf in find_leaves(expected, _Key):
        found = _at(tree, path)
        if isinstance(found, RawTensor):
            file.tensors[leaf.key] = found
        elif found is not None:
            raise CorruptError(f"{where}: {leaf.key!r} should be a tensor")
    return file


@dataclass(frozen=True, slots=True)
class _Key:
    """A tensor's key, as a leaf."""

    key: str


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """What a tree has at a path, None if it has nothing there."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys()


class _Sorter:
    """Makes a `StateFile` of a foreign state dict."""

    def __init__(self, storage: Storage, name: str, order: Sequence[str]) -> None:
        self._storage = storage
        self._name = name
        self._where = f"{storage.url}/{name}"
        self._order = order
        self._file = StateFile()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def sort(self, tree: Mapping[Any, Any]) -> StateFile:
        """All objects of a top-level dict."""
        if any(isinstance(value, RawTensor) for value in tree.values()):
            tree = {"model": tree}
        optimizers = {name: value for name, value in tree.items() if _is_optimizer(value)}
        for name, value in tree.items():
            if name not in optimizers:
                self._object(str(name), value)
        tensors = self._file.tensors.items()
        self._shapes = {key.partition(".")[2]: raw.sizes for key, raw in tensors}
        for name, value in optimizers.items():
            self._optimizer(str(name), value)
        return self._file

    def _object(self, name: str, value: Any) -> None:
        """Tensors by their paths; the values too, with references to the tensors."""
        self._file.extras[name] = self._encoded(name, value)

    def _encoded(self, path: str, value: Any) -> Any:
        def leaf(at: str, raw: Any) -> Any:
            if not isinstance(raw, RawTensor):
                return NotImplemented
            if at in self._file.tensors:
                raise IncompatibleError(f"{self._where}: two tensors are called {at!r}")
            self._file.tensors[at] = raw
            return tagged("tensor", at)

        try:
            return encode_value(value, path, leaf)
        except UsageError as error:
            raise CorruptError(f"{self._where}: {error}") from None

    # --------------------------------------------------------------------------------- optimizers

    def _optimizer(self, name: str, value: Mapping[str, Any]) -> None:
        groups = value["param_groups"]
        if not isinstance(groups, list) or not isinstance(value["state"], dict):
            raise CorruptError(f"{self._where}: {name!r} is not the state of an optimizer")
        names = self._names(name, groups)
        others: dict[str, Any] = {}
        for parameter, own in value["state"].items():
            fqn = names.get(parameter)
            if fqn is None or not isinstance(own, dict):
                raise CorruptError(f"{self._where}: {name}: no group has parameter {parameter!r}")
            values = self._state(name, fqn, own)
            if values:
                others[fqn] = values
        if others:
            self._file.extras[name] = {"state": others}
        for number, group in enumerate(groups):
            self._file.groups.append(self._group(name, number, group, names))

    def _names(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
        """The FQN of each parameter, by how the state names it."""
        names: dict[Any, str] = {}
        for group in groups:
            own = group.get("param_names")
            given = own if isinstance(own, list) and len(own) == len(group["params"]) else None
            for place, parameter in enumerate(group["params"]):
                known = given[place] if given else parameter
                names[parameter] = (
                    known if isinstance(known, str) else self._ordered(optimizer, known)
                )
        if len(set(names.values())) < len(names):
            raise IncompatibleError(f"{self._where}: {optimizer}: two parameters have one name")
        return names

    def _ordered(self, optimizer: str, number: Any) -> str:
        if not self._order:
            raise UsageError(
                f"{self._where}: {optimizer!r} numbers its parameters and does not name them; give "
                "their names in the order in which the optimizer got them (--parameter-order FILE)"
            )
        if not isinstance(number, int) or not 0 <= number < len(self._order):
            raise IncompatibleError(
                f"{self._where}: {optimizer!r} has a parameter {number!r}, but the parameter order "
                f"names {len(self._order)}"
            )
        return self._order[number]

    def _state(self, optimizer: str, fqn: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of one parameter's state; what is left are values."""
        values = {}
        for state_key, value in own.items():
            key = f"{optimizer}.state.{fqn}.{state_key}"
            encoded = self._encoded(key, value)
            if isinstance(value, RawTensor):
                self._file.states[key] = StateOf(optimizer, fqn, str(state_key))
            else:
                values[str(state_key)] = encoded
        self._check_shapes(optimizer, fqn, own)
        return values

    def _check_shapes(self, optimizer: str, fqn: str, own: Mapping[str, Any]) -> None:
        """State with dims that fit none of its parameter's is the sign of a wrong order."""
        sizes = self._shapes.get(fqn)
        shapes = [raw.sizes for raw in own.values() if isinstance(raw, RawTensor) and raw.sizes]
        if sizes is None or not self._order or not shapes:
            return
        if all(len(shape) == len(sizes) and shape != sizes for shape in shapes):
            raise IncompatibleError(
                f"{self._where}: {optimizer}: the state of {fqn!r} has shape {list(shapes[0])}, "
                f"the parameter {list(sizes)}: is the parameter order the right one?"
            )

    def _group(
        self, optimizer: str, number: int, group: Mapping[str, Any], names: Mapping[Any, str]
    ) -> GroupEntry:
        values = {
            str(key): self._hyperparameter(f"{optimizer}: group {number}: {key}", value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        fqns = tuple(names[parameter] for parameter in group["params"])
        return GroupEntry(optimizer, str(number), fqns, values)

    def _hyperparameter(self, what: str, value: Any) -> Any:
        """A value as JSON; a 0-D tensor (such as `lr`) by its number."""
        if isinstance(value, RawTensor):
            return self._number(what, value)
        return encode_value(list(value) if isinstance(value, tuple) else value, what)

    def _number(self, what: str, raw: RawTensor) -> Any:
        form = _NUMBERS.get(raw.dtype)
        if form is None or raw.byte_length != struct.calcsize(form):
            raise IncompatibleError(f"{self._where}: {what} is a tensor that is no plain number")
        data = self._storage.read(self._name, raw.byte_offset, raw.byte_length)
        return encode_value(struct.unpack(form, data)[0], what)
