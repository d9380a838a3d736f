"""The process that opens a CUDA context to measure it: `python -m tuner.measure.context_child CHANNEL`.

It sees one GPU, warms up as a trial does (convolution, linear, backward, optimizer step), and
writes what NVML shows beyond the allocator's segments to the file descriptor CHANNEL, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def measure() -> dict[str, Any]:
    """Return the fields of a `MeasuredContext` for the one GPU this process sees.

    Raises:
        RuntimeError: There is no usable GPU, or NVML gives no figure.
    """
    import torch

    from tuner.measure import nvml
    from tuner.measure.meters import open_meter, used_before, visible_device
    from tuner.warmup import warm_up

    device = torch.device("cuda", 0)
    before = used_before(device)
    warm_up(device)
    peaks = open_meter(device, before, among_others=True).peaks()
    if peaks.baseline_bytes is None:
        reason = nvml.device_use(visible_device()).source
        raise RuntimeError(f"NVML does not say what a process uses: {reason}")
    return {
        "context_bytes": peaks.baseline_bytes,
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "source": peaks.source,
    }


if __name__ == "__main__":
    try:
        answer = measure()
    except Exception as error:
        # The last line of the log is what the user reads.
        sys.exit(" ".join(f"{error}".split()) or type(error).__name__)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as channel:
        json.dump(answer, channel)
