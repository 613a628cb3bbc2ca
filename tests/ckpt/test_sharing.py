"""What several ranks hold is read once, and reaches all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CorruptError
from ckpt.loading import load
from ckpt.saving import save
from ckpt.sharing import ALIGNMENT, BUCKET_BYTES, plan_sharing
from ckpt.summary import bytes_by_name
from hyperopt.ownership import Box
from tests.ckpt.states import Net, OwnerOptimizer, assert_model, fill, shard
from tests.distributed import run_ranks

requests = st.tuples(
    st.sampled_from("abcd"),
    st.builds(lambda start, size: Box((start,), (size,)), st.integers(0, 3), st.integers(1, 9)),
)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.lists(st.lists(requests, max_size=8), min_size=1, max_size=5))
def test_everybody_gets_what_it_wants_and_each_box_is_read_once(
    wanted: list[list[tuple[str, Box]]],
) -> None:
    plan = plan_sharing(wanted, dict.fromkeys("abcd", 4))
    got = [set(alone) for alone in plan.alone]
    read = [request for alone in plan.alone for request in alone]
    for bucket in plan.buckets:
        assert bucket.reader in bucket.holders
        read += bucket.requests
        for rank in bucket.holders:
            assert not got[rank] & set(bucket.requests)
            got[rank] |= set(bucket.requests)
        ends = [o + r[1].elements * 4 for o, r in zip(bucket.offsets, bucket.requests, strict=True)]
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert all(offset % ALIGNMENT == 0 for offset in bucket.offsets)
        assert ends[-1] < bucket.nbytes
    assert got == [set(own) for own in wanted]
    assert len(read) == len(set(read))


def test_buffers_are_bounded_and_work_is_shared_out() -> None:
    box = Box((0,), (BUCKET_BYTES // 8,))
    wanted = [[(f"t{i}", box) for i in range(12)]] * 3
    plan = plan_sharing(wanted, {f"t{i}": 4 for i in range(12)})
    assert all(bucket.nbytes <= BUCKET_BYTES + 1 for bucket in plan.buckets)
    boxes = [sum(len(b.requests) for b in plan.buckets if b.reader == rank) for rank in range(3)]
    assert boxes == [4, 4, 4]


def build(sizes: tuple[int, int], filled: bool) -> tuple[nn.Module, OwnerOptimizer]:
    model: nn.Module = Net()
    if filled:
        fill(model)
    model = shard(model, sizes)
    return model, OwnerOptimizer(model.named_parameters(), sizes[0])


def saved_and_loaded(path: str) -> list[tuple[int, ...]]:
    model, optimizer = build((2, 2), True)
    optimizer.run(3)
    save(path, model=model, optimizer=optimizer)
    read = []
    for once in (False, True):
        for sizes in ((2, 2), (4, 1)):
            model, optimizer = build(sizes, False)
            report = load(path, read_once=once, model=model, optimizer=optimizer)
            read.append(report.bytes_read)
            assert_model(model)
            optimizer.assert_state(3)
    model, _ = build((2, 2), False)
    read.append(load(path, read_once=True, model=model).bytes_read)
    return read


def test_model_bytes_are_read_once(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    two, four, two_once, four_once, model = run_ranks(saved_and_loaded, 4, path)[0]
    size = bytes_by_name(open_checkpoint(path).manifest)["model"]
    assert sum(model) == size
    assert max(model) < 2 * size / 4
    # Everything but what owners hold alone was read by each replica before.
    assert sum(two_once) < sum(two)
    assert sum(four_once) < sum(four) / 2


def damaged(path: str) -> str:
    model, _ = build((2, 2), True)
    save(path, model=model)
    if dist.get_rank() == 0:
        chunk = open_checkpoint(path).chunks("model.up.bias")[0]
        file = Path(path) / chunk.file
        content = bytearray(file.read_bytes())
        content[chunk.byte_offset] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(CorruptError) as caught:
        load(path, read_once=True, model=model)
    return str(caught.value)


def test_a_reader_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    results = run_ranks(damaged, 4, str(tmp_path / "c"))
    assert len(set(results)) == 1
    assert "are not those that were written" in results[0]
    assert "could not read what it reads for this one" in results[0]


def test_one_process_just_reads(tmp_path: Path) -> None:
    save(tmp_path / "c", extra={"t": torch.arange(5)})
    extra: dict[str, torch.Tensor] = {}
    assert load(tmp_path / "c", read_once=True, extra=extra).bytes_read == (40,)
    assert extra["t"].tolist() == [0, 1, 2, 3, 4]
