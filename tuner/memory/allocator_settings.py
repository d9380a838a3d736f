"""What `PYTORCH_ALLOC_CONF` sets, as a value.

Parsed as in `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` of torch 2.13. One
difference: a number must be a number, where `std::stoull` reads `1e3` as 1 and wraps `-5` around.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tuner.errors import UsageError
from tuner.units import MIB

ROUNDING = 512  # kMinBlockSize
DEFAULT_LARGE_SEGMENT = 20 * MIB
_SMALLEST_LARGE_SEGMENT = 10 * MIB  # kMinLargeAlloc
_INTERVALS = 16  # of roundup_power2_divisions: powers of two from 1 MiB on

_HINT = "settings look like max_split_size_mb:128,expandable_segments:True"
_MODELLED = (
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
)
# Without effect on the device's memory: they are read and left alone.
_IGNORED = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
KNOWN = tuple(sorted((*_MODELLED, *_IGNORED, "backend")))


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of the caching allocator that change what it reserves.

    Attributes:
        max_split_bytes: Blocks of this size or more ("oversize") are never split, and serve no
            smaller requests; None for no bound.
        max_non_split_rounding_bytes: An oversize block serves a request when it is less than this larger.
        power2_divisions: For each power of two from 1 MiB on, into how many steps the way to the next
            is divided when sizes are rounded; 0 and 1 round to 512 B. Empty for 0 everywhere.
        garbage_collection_threshold: Share of the limit above which old free segments are released;
            0 for never.
        expandable_segments: Whether one segment per stream and pool grows page by page.
        large_segment_bytes: The segment (or page) that requests between 1 and 10 MiB share.
        memory_fraction: The share of the device that may be reserved.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = DEFAULT_LARGE_SEGMENT
    power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT
    memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings in a text such as `max_split_size_mb:128,expandable_segments:True`.

        Raises:
            UsageError: The text cannot be read, a key is unknown, or PyTorch refuses a value.
        """
        return cls(**_Parser(text).fields())

    def rounded(self, requested_bytes: int) -> int:
        """Return the block size for a request (`round_size`)."""
        if requested_bytes < ROUNDING:
            return ROUNDING
        divisions = self._divisions(requested_bytes)
        if divisions > 1 and requested_bytes > ROUNDING * divisions:
            return _next_division(requested_bytes, divisions)
        return -(-requested_bytes // ROUNDING) * ROUNDING

    def _divisions(self, size: int) -> int:
        if not self.power2_divisions:
            return 0
        interval = min(max(size.bit_length() - 21, 0), _INTERVALS - 1)
        return self.power2_divisions[interval]


def _next_division(size: int, divisions: int) -> int:
    """Return `size` rounded up to the next of `divisions` steps between powers of two.

    As in `roundup_power2_next_division`.
    """
    step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
    return -(-size // step) * step


class _Parser:
    """Reads tokens as PyTorch's `ConfigTokenizer` does: `:`, `,`, `[` and `]` stand alone."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
        self.position = 0
        self.large_segment_bytes = DEFAULT_LARGE_SEGMENT

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.position < len(self.tokens):
            found.update(self._setting(self._next()))
            if self.position < len(self.tokens):
                self._expect(",")
        return found

    def _setting(self, key: str) -> dict[str, Any]:
        if key not in KNOWN:
            raise UsageError(
                f"there is no allocator setting '{key[:80]}'; known: {', '.join(KNOWN)}", hint=_HINT
            )
        self._expect(":")
        if key in _IGNORED:
            self._skip_value()
            return {}
        if key == "backend":
            self._one_of(key, ("native",))
            return {}
        if key == "expandable_segments":
            return {key: self._one_of(key, ("True", "False")) == "True"}
        if key == "roundup_power2_divisions":
            return {"power2_divisions": self._divisions()}
        if key == "garbage_collection_threshold":
            return {key: self._share(key, closed=False)}
        if key == "per_process_memory_fraction":
            return {"memory_fraction": self._share(key, closed=True)}
        return self._size(key)

    def _size(self, key: str) -> dict[str, Any]:
        size_bytes = self._whole(key) * MIB
        if key == "large_segment_size_mb":
            if size_bytes <= _SMALLEST_LARGE_SEGMENT:
                raise UsageError(f"{key} must be more than 10", hint=_HINT)
            self.large_segment_bytes = size_bytes
            return {"large_segment_bytes": size_bytes}
        smallest = self.large_segment_bytes
        if size_bytes < smallest:
            raise UsageError(f"{key} must be at least {smallest // MIB}", hint=_HINT)
        field = "max_split_bytes" if key == "max_split_size_mb" else "max_non_split_rounding_bytes"
        return {field: size_bytes}

    def _divisions(self) -> tuple[int, ...]:
        """Return the divisions of each interval, from one number or a list such as `[256:1,>:4]`."""
        key = "roundup_power2_divisions"
        if self._peek() != "[":
            return (self._power_of_two(key),) * _INTERVALS
        self._next()
        found = [0] * _INTERVALS
        first, last = True, 0
        while self._peek() != "]":
            bound = self._next()
            self._expect(":")
            if bound == ">":
                found[last + 1 :] = [self._power_of_two(key, zero=True)] * (_INTERVALS - last - 1)
            else:
                self.position -= 2
                interval = min(self._power_of_two(key).bit_length() - 1, _INTERVALS - 1)
                self._expect(":")
                divisions = self._power_of_two(key, zero=True)
                if first:
                    found[:interval] = [divisions] * interval
                found[interval] = divisions
                first, last = False, interval
            if self._peek() != "]":
                self._expect(",")
        self._next()
        return tuple(found)

    def _peek(self) -> str:
        if self.position == len(self.tokens):
            raise UsageError("the allocator settings end too early", hint=_HINT)
        return self.tokens[self.position]

    def _next(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _expect(self, token: str) -> None:
        found = self._next()
        if found != token:
            raise UsageError(
                f"the allocator settings have '{found[:80]}' where '{token}' belongs", hint=_HINT
            )

    def _skip_value(self) -> None:
        if self._next() == "[":
            while self._next() != "]":
                pass

    def _one_of(self, key: str, words: tuple[str, ...]) -> str:
        word = self._next()
        if word not in words:
            raise UsageError(f"{key} takes {' or '.join(words)}, not '{word[:80]}'", hint=_HINT)
        return word

    def _whole(self, key: str) -> int:
        word = self._next()
        if not re.fullmatch(r"[0-9]{1,12}", word):
            raise UsageError(f"{key} takes a whole number, not '{word[:80]}'", hint=_HINT)
        return int(word)

    def _power_of_two(self, key: str, *, zero: bool = False) -> int:
        value = self._whole(key)
        if value & (value - 1) or not (value or zero):
            raise UsageError(f"{key} takes powers of two, not {value}", hint=_HINT)
        return value

    def _share(self, key: str, *, closed: bool) -> float:
        word = self._next()
        try:
            share = float(word)
        except ValueError:
            share = -1.0
        if not (0 <= share <= 1 if closed else 0 < share < 1):
            raise UsageError(f"{key} takes a number between 0 and 1, not '{word[:80]}'", hint=_HINT)
        return share
