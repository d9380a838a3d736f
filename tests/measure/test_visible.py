"""CUDA_VISIBLE_DEVICES, against PyTorch's own reading of it."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tuner.measure.visible import Listed, visible_uuids

GPUS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]
LISTED = [Listed(uuid) for uuid in GPUS]
SLICED = [Listed("GPU-aa", ("MIG-1x", "MIG-2x")), Listed("GPU-bb"), Listed("GPU-cc", ())]
ENTRIES = st.one_of(
    st.sampled_from(["0", "1", "2", "3", "-1", " 1", "1 ", "+2", "01", "1gpu2", "", "x", "GPU-", "GPU-a"]),
    st.sampled_from(["GPU-aa1", "GPU-bb33", "GPU-b", "GPU-zz", "gpu-bb33", "MIG-1"]),
)


def by_pytorch(value: str | None) -> list[str]:
    """Return the UUIDs that PyTorch takes to be visible, as `torch.cuda.device_count` does."""
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    kept = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with mock.patch.dict(os.environ, {**kept, **environment}, clear=True):
        named = torch.cuda._parse_visible_devices()
    if named and isinstance(named[0], str):
        numbers = torch.cuda._transform_uuid_to_ordinals(named, GPUS)
    else:
        first_invalid = next((place for place, index in enumerate(named) if index >= len(GPUS)), len(named))
        numbers = named[:first_invalid]
    return [GPUS[number] for number in numbers]


@given(st.none() | st.lists(ENTRIES, min_size=1, max_size=4).map(",".join))
@example(None)
@example("")
@example("0,7,1")
@example("1,1")
@example("GPU-a")
@example("GPU-bb,GPU-bb33")
@example("2,0")
def test_what_is_visible_is_what_pytorch_takes_to_be(value: str | None) -> None:
    if value is None or not value.startswith("MIG-"):
        assert visible_uuids(value, LISTED) == by_pytorch(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ["MIG-1x", "GPU-bb"]),  # the third is in MIG mode and has no slice
        ("0", ["MIG-1x"]),
        ("1,0", ["GPU-bb", "MIG-1x"]),
        ("MIG-2", ["MIG-2x"]),
        ("MIG-2x,MIG-1x", ["MIG-2x", "MIG-1x"]),
        ("MIG-2x,MIG-3x,MIG-1x", ["MIG-2x"]),
        ("MIG-", []),
        ("GPU-aa", ["MIG-1x"]),
    ],
)
def test_a_gpu_in_mig_mode_stands_for_its_first_slice(value: str | None, expected: list[str]) -> None:
    assert visible_uuids(value, SLICED) == expected
