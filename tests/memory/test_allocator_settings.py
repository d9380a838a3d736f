"""What `PYTORCH_ALLOC_CONF` says, against PyTorch's own parser and rounding's documented examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tuner.errors import UsageError
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.units import GIB, MIB

DEFAULTS = "large_segment_size_mb:20,max_non_split_rounding_mb:20,expandable_segments:False"


@pytest.fixture
def pytorch() -> Iterator[Callable[[str], None]]:
    """PyTorch's parser, which the CPU build has too; some of its settings outlive a call."""
    parse = torch._C._accelerator_setAllocatorSettings
    parse(DEFAULTS)
    yield parse
    parse(DEFAULTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_split_size_mb:20",
        " max_split_size_mb: 128 , expandable_segments:False",
        "max_split_size_mb:128,",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[64:8,256:0]",
        "roundup_power2_divisions:[]",
        "expandable_segments:True",
        "large_segment_size_mb:64,max_split_size_mb:64",
        "max_non_split_rounding_mb:40",
        "pinned_use_background_threads:True",
        "backend:native",
        "per_process_memory_fraction:0.5",
    ],
)
def test_what_pytorch_reads_is_read(pytorch: Callable[[str], None], text: str) -> None:
    pytorch(text)
    AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "large_segment_size_mb:64,max_split_size_mb:63",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:19",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:much",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[256:3]",
        "roundup_power2_divisions:[300:2]",
        "roundup_power2_divisions:[256:1",
        "expandable_segments:true",
        "expandable_segments:[a]",
        "max_split_size_mb",
        "max_split_size_mb:",
        "max_split_size_mb 128",
    ],
)
def test_what_pytorch_refuses_is_refused(pytorch: Callable[[str], None], text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        pytorch(text)
    with pytest.raises(UsageError):
        AllocatorSettings.parse(text)


def test_an_unknown_key_names_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"'max_splitsize_mb'; known: backend, expandable_segments, .*max_split"
    ):
        AllocatorSettings.parse("max_splitsize_mb:128")


def test_settings_become_fields() -> None:
    text = "max_split_size_mb:128,garbage_collection_threshold:0.8,expandable_segments:True,backend:native"
    assert AllocatorSettings.parse(text) == AllocatorSettings(
        max_split_bytes=128 * MIB, garbage_collection_threshold=0.8, expandable_segments=True
    )


# PyTorch's own AllocatorConfig test: this list gives 8 up to 64 MiB, 1 from 2 GiB on.
LISTED = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 1 << 20: 1}


@pytest.mark.parametrize(("size_mib", "divisions"), LISTED.items())
def test_a_list_of_divisions_covers_what_pytorchs_own_test_says(size_mib: int, divisions: int) -> None:
    text = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    assert AllocatorSettings.parse(text)._divisions(size_mib * MIB) == divisions


@pytest.mark.parametrize(
    ("divisions", "requested", "rounded"),
    [
        ("4", 1, 512),
        ("4", 2048, 2048),  # up to 512 B × divisions: multiples of 512 B
        ("4", 2049, 2560),  # 2048, 2560, 3072, 3584, 4096
        ("4", 5000, 5120),
        ("4", 33 * MIB, 40 * MIB),
        ("8", 3000 * MIB, 3072 * MIB),
        ("[256:1,512:2,>:4]", 600 * MIB, 768 * MIB),
        ("[256:1,512:2,>:4]", 1100 * MIB, 1280 * MIB),
        ("[256:1,512:2,>:4]", 300 * MIB + 1, 300 * MIB + 512),  # one division changes nothing
        ("[256:0,>:2]", 300 * MIB + 1, 300 * MIB + 512),
        ("2", 5 * GIB, 6 * GIB),
    ],
)
def test_sizes_are_rounded_between_powers_of_two(divisions: str, requested: int, rounded: int) -> None:
    """By hand from `round_size`: the way from one power of two to the next in equal steps."""
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    assert settings.rounded(requested) == rounded
