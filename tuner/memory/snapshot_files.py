"""Reading memory snapshots: PyTorch's pickle, opened without running anything, or JSON.

A pickle is a program. This reader's unpickler refuses every global, so that nothing but numbers, text,
lists, tuples and dicts can come out, and it runs under a bound on memory, since a few bytes of a
pickle can ask for gigabytes.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.memory.snapshot import DeviceHistory
from tuner.memory.snapshot_format import Malformed, histories
from tuner.processes import process_memory
from tuner.units import GIB, MIB, format_bytes

_LARGEST = 4 * GIB  # of a file, and of what a compressed one holds
_MEMORY_PER_BYTE = 64  # a small object takes Python 30 bytes or more where a pickle takes one or two
_MEMORY_AT_LEAST = 512 * MIB
_HINT = "tuner replay reads what torch.cuda.memory._dump_snapshot writes; see docs/replay.md"


def read_snapshot(path: Path) -> list[DeviceHistory]:
    """Return what a snapshot says of each device that has segments or events.

    Args:
        path: A pickle of `torch.cuda.memory._snapshot()`, the same as JSON, or JSON with the keys
            `events` (rows of action, address, size, stream) and `segments`; each may be gzipped.

    Raises:
        UsageError: The file cannot be read, is no snapshot, or tries to run code.
    """
    data = _contents(path)
    try:
        with _bounded_memory(len(data) * _MEMORY_PER_BYTE + _MEMORY_AT_LEAST):
            return histories(_decoded(path, data))
    except Malformed as error:
        raise UsageError(f"{path} is no memory snapshot: {error}", hint=_HINT) from None
    except MemoryError:
        raise UsageError(f"{path} asks for more memory than a snapshot of its size needs") from None


class _DataUnpickler(pickle.Unpickler):  # noqa: S301  # what it is for
    """Opens data, refuses code."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(f"{module}.{name}"[:80])


class _Refused(Exception):
    """A pickle names something to import or call."""


def _contents(path: Path) -> bytes:
    """Return the bytes of a file, decompressed.

    Raises:
        UsageError: It cannot be read, or holds too much.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path} is larger than {format_bytes(_LARGEST)}")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise UsageError(f"{path} is cut short or damaged", hint=_HINT) from None
    if len(data) > _LARGEST:
        raise UsageError(f"{path} holds more than {format_bytes(_LARGEST)}")
    return data


def _decoded(path: Path, data: bytes) -> Any:
    try:
        if data.lstrip()[:1] in (b"{", b"["):
            return json.loads(data)
        return _DataUnpickler(io.BytesIO(data)).load()
    except _Refused as refused:
        raise UsageError(
            f"{path} is refused: it wants to import {refused}, and a memory snapshot is plain data",
            hint=_HINT,
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # the unpickler raises whatever a broken stream leads it to
        reason = "it is empty" if not data else f"{type(error).__name__}: {str(error)[:120]}"
        raise UsageError(f"{path} cannot be read as a memory snapshot: {reason}", hint=_HINT) from None


@contextmanager
def _bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let this process take `more_bytes` and no more, where the system can say what it holds."""
    memory = process_memory()
    if memory is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = memory.data_bytes + more_bytes
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([bound, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
