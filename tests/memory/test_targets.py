"""Profiles against what others published: nvidia-smi's totals, PyTorch's own tests, NVML's names."""

from __future__ import annotations

import statistics

import pytest

from tuner.errors import UsageError
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import Estimate, predict
from tuner.memory.targets import known_targets, profile_names, profile_of, resolve_target
from tuner.memory.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes
from tuner.units import GIB, KIB, MIB

# Total memory as nvidia-smi shows it, in MiB, and compute capability (developer.nvidia.com/cuda-gpus).
CARDS = {
    "t4": (15360, (7, 5)),
    "v100-16gb": (16160, (7, 0)),
    "v100-32gb": (32510, (7, 0)),
    "p100-16gb": (16280, (6, 0)),
    "a10": (23028, (8, 6)),
    "a10g": (23028, (8, 6)),
    "a100-40gb": (40960, (8, 0)),
    "a100-80gb": (81920, (8, 0)),
    "l4": (23034, (8, 9)),
    "l40s": (46068, (8, 9)),
    "h100-80gb": (81559, (9, 0)),
    "h200": (143771, (9, 0)),
    "b200": (183359, (10, 0)),
    "rtx-2080-ti": (11264, (7, 5)),
    "rtx-3060": (12288, (8, 6)),
    "rtx-3070": (8192, (8, 6)),
    "rtx-3080-10gb": (10240, (8, 6)),
    "rtx-3080-12gb": (12288, (8, 6)),
    "rtx-3090": (24576, (8, 6)),
    "rtx-4060": (8188, (8, 9)),
    "rtx-4070-ti": (12282, (8, 9)),
    "rtx-4080": (16376, (8, 9)),
    "rtx-4090": (24564, (8, 9)),
    "rtx-5090": (32607, (12, 0)),
    "rtx-6000-ada": (49140, (8, 9)),
}


def test_every_card_has_a_profile_and_every_profile_a_card() -> None:
    assert set(profile_names()) == set(CARDS)
    assert known_targets() == ["cpu", "cuda", *profile_names()]


@pytest.mark.parametrize("name", CARDS)
def test_pytorch_gets_up_to_3_5_percent_less_than_nvidia_smi_shows(name: str) -> None:
    target, (total_mib, capability) = resolve_target(name), CARDS[name]
    assert target.capacity_bytes is not None
    assert 0.965 <= target.capacity_bytes / (total_mib * MIB) <= 1
    assert target.compute_capability == capability


def test_capacities_published_to_the_byte() -> None:
    """reference/nvml_rows_HOW.md; unslothai/unsloth-zoo#1053."""
    published = {"rtx-3060": 12_622_168_064, "rtx-4060": 8_318_222_336, "rtx-6000-ada": 50_865_307_648}
    assert {name: resolve_target(name).capacity_bytes for name in published} == published


@pytest.mark.parametrize("name", [name for name in known_targets() if name != "cpu"])
def test_every_profile_says_where_its_figures_come_from(name: str) -> None:
    target = resolve_target(name)
    assert target.kind == "cuda"
    assert target.context_bytes
    assert target.context_spread_bytes > 0
    assert len(target.context_source) > 20
    assert bool(target.capacity_source) == (name != "cuda")
    assert target.context_source.startswith("not measured") == (not target.context_measured)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx3090", "rtx-3090"),
        ("3090", "rtx-3090"),
        ("RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("2080ti", "rtx-2080-ti"),
        ("4070-ti", "rtx-4070-ti"),
        ("a100", "a100-40gb"),  # of two the smaller: no promise that is not kept
        ("A100-80", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("v100", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("H100", "h100-80gb"),
        ("rtx-3080", "rtx-3080-10gb"),
        ("rtx 6000 ada", "rtx-6000-ada"),
        ("sm90", "sm_90"),
        ("sm_120", "sm_120"),
        ("CUDA:1", "cuda:1"),
    ],
)
def test_a_name_is_understood_however_it_is_spelled(name: str, expected: str) -> None:
    target = resolve_target(name)
    assert target.name == expected
    again = resolve_target(target.profile)  # what the tracing process is given
    assert (again.kind, again.workspace_bytes) == (target.kind, target.workspace_bytes)


@pytest.mark.parametrize("name", ["rtx", "", "nvidia", "3091", "a1000", "cuda:x", "sm_", "laptop 3090"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match="there is no target") as raised:
        resolve_target(name)
    assert raised.value.hint is not None
    assert "rtx-3090" in raised.value.hint


@pytest.mark.parametrize(
    ("nvml_name", "total_mib", "expected"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 8192, None),  # the card is sold with 8 GB too
        ("NVIDIA GeForce RTX 3060 Laptop GPU", 6144, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728, None),
        ("Tesla T4", 15360, "t4"),
        ("Tesla V100S-PCIE-32GB", 32510, "v100-32gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA RTX 6000 Ada Generation", 46068, "rtx-6000-ada"),  # with ECC
        ("NVIDIA RTX 4000 Ada Generation", 20475, None),
        ("NVIDIA RTX A6000", 49140, None),
    ],
)
def test_nvml_s_name_and_memory_give_the_profile(
    nvml_name: str, total_mib: int, expected: str | None
) -> None:
    assert profile_of(nvml_name, total_mib * MIB) == expected


def test_a_range_counts_as_a_uniform_distribution() -> None:
    """Its middle and standard deviation, against those of numbers drawn evenly from it."""
    target = resolve_target("rtx-4090")
    assert target.context_range_bytes == (256 * MIB, 636 * MIB)
    assert not target.context_measured
    evenly = range(256 * MIB, 636 * MIB, 100 * KIB)
    assert target.context_bytes == pytest.approx(statistics.mean(evenly), rel=1e-3)
    assert target.context_spread_bytes == pytest.approx(statistics.pstdev(evenly), rel=1e-3)


def test_the_band_is_wider_where_nobody_measured_the_context() -> None:
    found = Estimate(GIB, GIB, GIB)
    widths = {}
    for name in ("a100-40gb", "a100-80gb"):
        target = resolve_target(name)
        band = predict(found, target, Calibration.prior("cuda"), context_bytes=None, budget_bytes=None).device
        assert band is not None
        widths[name] = band.high - band.low
        if name == "a100-80gb":  # all of the range is inside
            assert band.low < GIB + 256 * MIB
            assert band.high > GIB + 636 * MIB
    assert widths["a100-80gb"] > 1.5 * widths["a100-40gb"]


@pytest.mark.parametrize(
    ("config", "expected_bytes"),
    [
        (None, 8_519_680),
        ("", 8_519_680),
        ("-1", 8_519_680),  # PyTorch's test_cuda.py: a bad one is ignored
        (":4096:2:16:8", 8_519_680),
        (":16:8", 131_072),
        (":4096:8", 33_554_432),
        (":128:8:64:16:32:32", 3072 * 1024),  # test_cuda.py: several pairs
        (":0:0", 0),
    ],
)
def test_the_workspace_config_is_read_as_pytorch_reads_it(config: str | None, expected_bytes: int) -> None:
    environment = {} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config}
    assert cublas_workspace_bytes((8, 6), environment) == expected_bytes


@pytest.mark.parametrize(
    ("capability", "expected_bytes"),
    [(None, 8_519_680), ((8, 9), 8_519_680), ((9, 0), 32 * MIB), ((10, 0), 32 * MIB), ((12, 0), 32 * MIB)],
)
def test_hopper_and_blackwell_have_32_mib(capability: tuple[int, int] | None, expected_bytes: int) -> None:
    assert cublas_workspace_bytes(capability, {}) == expected_bytes


@pytest.mark.parametrize(
    ("environment", "expected_bytes"),
    [
        ({}, 0),  # part of the cuBLAS workspace
        ({"CUBLASLT_WORKSPACE_SIZE": "4096"}, 0),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, 1 * MIB),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "not a number"}, 1 * MIB),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "32768"}, 32 * MIB),
    ],
)
def test_the_cublaslt_workspace(environment: dict[str, str], expected_bytes: int) -> None:
    assert cublaslt_workspace_bytes(environment) == expected_bytes


def test_the_environment_of_this_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    target = resolve_target("h100")
    assert (target.cublas_workspace_bytes, target.workspace_bytes) == (131_072, 262_144)
