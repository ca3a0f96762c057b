"""GPU facts: the table, what the driver's answers become, and cards that nobody knows yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microscale import hardware
from microscale.errors import BadSetting, Unsupported
from microscale.hardware import FAMILY_OF_SM, GENERIC, GIB, KNOWN, PROVED_BY, REPRESENTATIVES, Feature, UnknownGpu


def test_every_card_of_the_design_is_known() -> None:
    names = ["a100", "rtx3090", "rtx4090", "l40s", "h100", "h200", "b200", "gb300", "rtx5090", "rtxpro6000", "gb10"]
    assert list(KNOWN)[: len(names)] == names
    for name in KNOWN:
        card = hardware.known(name)
        assert card.num_sms > 0
        assert card.bandwidth_gbs > 0
        assert card.peak.bf16 > 0
        assert card.has(Feature.MMA_BF16)
        assert card.shared_per_block in (101376, 166912, 232448)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="rtx5090"):
        hardware.known("rtx9999")


def test_siblings_do_not_inherit_from_each_other() -> None:
    rtx, datacentre = hardware.known("rtx5090"), hardware.known("b200")
    assert rtx.has(Feature.MX_MMA)
    assert not rtx.has(Feature.TCGEN05)
    assert datacentre.has(Feature.TCGEN05)
    assert not datacentre.has(Feature.MX_MMA)
    assert not datacentre.has(Feature.WGMMA)
    assert hardware.known("gb10").family is rtx.family
    assert hardware.known("gb10").shared_per_block == 101376


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100"),
        ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.0, "rtxpro6000"),
        ("NVIDIA GB10", 119.7, "gb10"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, "rtx3090ti"),
        ("NVIDIA GeForce RTX 5060 Ti", 15.5, "rtx5060ti"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx6000ada"),
        ("NVIDIA RTX PRO 4500 Blackwell", 31.3, "rtxpro4500"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A10", 22.0, "a10"),
        ("NVIDIA H20", 95.1, "h20"),
        ("NVIDIA B300 SXM6 AC", 267.7, "b300"),
    ],
)
def test_drivers_names_find_their_row(name: str, gib: float, expected: str) -> None:
    row = KNOWN[expected]
    memory = int(gib * GIB)
    gpu = hardware.describe(name, row.sm, row.num_sms, memory)
    assert (gpu.family, gpu.bandwidth_gbs, gpu.peak, gpu.unified) == (
        row.family,
        row.bandwidth_gbs,
        row.peak,
        row.unified,
    )
    assert (gpu.memory_bytes, gpu.name) == (memory, name)


@pytest.mark.parametrize(
    ("name", "sm", "num_sms", "gib"),
    [
        ("NVIDIA H100 PCIe", 90, 114, 79),
        ("NVIDIA A10G", 86, 80, 22),
        ("NVIDIA GeForce RTX 3080", 86, 70, 12),
        ("NVIDIA GeForce RTX 4060 Ti", 89, 34, 8),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", 89, 58, 12),
        ("NVIDIA A100-PCIE-40GB", 80, 108, 39),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 89, 76, 16),
        ("NVIDIA GeForce RTX 4090 D", 89, 114, 24),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 120, 82, 24),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 90, 16, 9),
        ("NVIDIA GH200 480GB", 90, 132, 95),
    ],
)
def test_namesakes_of_another_size_are_estimated_and_said(name: str, sm: int, num_sms: int, gib: int) -> None:
    with pytest.warns(UnknownGpu, match=name):
        gpu = hardware.describe(name, sm, num_sms, gib * GIB)
    assert gpu.family is FAMILY_OF_SM[sm]
    assert gpu.num_sms == num_sms


def test_unknown_card_of_a_known_family_is_estimated_and_said() -> None:
    with pytest.warns(UnknownGpu, match="RTX 5060"):
        gpu = hardware.describe("NVIDIA GeForce RTX 5060", 120, 30, 8 * GIB, integrated=True)
    assert gpu.family is FAMILY_OF_SM[120]
    assert gpu.bandwidth_gbs < 448  # what the vendor says of that card
    assert gpu.has(Feature.MX_MMA)
    assert gpu.peak.fp8
    assert gpu.peak.fp4
    assert gpu.unified


@pytest.mark.parametrize(
    ("name", "sm"), [("Tesla T4", 75), ("Tesla V100-SXM2-16GB", 70), ("NVIDIA GeForce GTX 1080", 61)]
)
def test_cards_before_ampere_are_refused(name: str, sm: int) -> None:
    with pytest.raises(Unsupported, match=rf"{name} \(SM {sm // 10}.{sm % 10}\) is older than Ampere"):
        hardware.describe(name, sm, 40, 16 * GIB)


def test_unknown_architecture_is_generic_and_said() -> None:
    with pytest.warns(UnknownGpu, match="generic"):
        gpu = hardware.describe("NVIDIA Something", 999, 64, 32 * GIB)
    assert gpu.family is GENERIC
    assert gpu.has(Feature.MMA_BF16)
    for feature in (Feature.WGMMA, Feature.TCGEN05, Feature.MX_MMA, Feature.PDL):
        assert not gpu.has(feature)
    assert gpu.peak.fp8 is None
    assert gpu.peak.fp4 is None
    assert gpu.shared_per_block == min(family.shared_per_block for family in FAMILY_OF_SM.values())


def test_system_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:   600 kB\nHugePages_Total:  0\n")
    assert hardware.system_memory(meminfo) == (1000 * 1024, 600 * 1024)
    total, available = hardware.system_memory(tmp_path / "missing")
    assert total == available > 0


def test_unified_memory_is_bounded_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * GIB, 120 * GIB))
    monkeypatch.setattr("microscale.hardware.gpu.system_memory", lambda: (120 * GIB, 30 * GIB))
    assert hardware.available_memory(hardware.known("gb10")) == 30 * GIB
    assert hardware.available_memory(hardware.known("h200")) == 100 * GIB


def test_a_played_card_is_what_the_machine_passes_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is its own, less what this process has of it; and never more than is free here."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (130 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 10 * GIB)
    really, card = hardware.present(), hardware.known("rtx4090")
    with hardware.played(card):
        assert hardware.detect() is card
        assert hardware.present() == really
        assert hardware.available_memory(card) == 14 * GIB
        with hardware.played(hardware.known("h200")):
            assert hardware.available_memory(hardware.detect()) == 130 * GIB
        assert hardware.detect() is card
    assert hardware.detect() == really
    assert hardware.available_memory(card) == 130 * GIB


def test_without_a_gpu_the_machine_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = hardware.detect()
    assert gpu.is_cpu
    assert not gpu.family.features
    assert 0 < hardware.available_memory(gpu) <= gpu.memory_bytes


def test_detect_reads_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count, total_memory, is_integrated = (
            "NVIDIA GB10",
            12,
            1,
            48,
            119 * GIB,
            True,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    gpu = hardware.detect()
    assert (gpu.sm, gpu.unified, gpu.memory_bytes) == (121, True, 119 * GIB)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("5090", "rtx5090"),
        ("RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("spark", "gb10"),
        ("DGX Spark", "gb10"),
        ("pro6000", "rtxpro6000"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000"),
        ("H200", "h200"),
        ("H200 141GB", "h200"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("5060 Ti 16GB", "rtx5060ti"),
        ("RTX 4060 Ti 16 GB", "rtx4060ti"),
        ("3090 ti", "rtx3090ti"),
        ("RTX A6000", "a6000"),
        ("6000 Ada", "rtx6000ada"),
        ("pro 4500", "rtxpro4500"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_names_that_people_type(name: str, card: str) -> None:
    assert hardware.known(name) is KNOWN[card]


@pytest.mark.parametrize("name", ["", "rtx", "509", "6000", "5090 Ti", "x5090"])
def test_other_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(Unsupported, match="known are a100, rtx3090"):
        hardware.known(name)


@pytest.mark.parametrize(("name", "there"), [("3080 12GB", "10 GiB"), ("RTX 5060 Ti 8 GB", "16"), ("A100 40GB", "80")])
def test_a_card_with_other_memory_is_refused_and_can_be_described(name: str, there: str) -> None:
    with pytest.raises(Unsupported, match=rf"only the one with {there}.*--gpu-spec sms="):
        hardware.known(name)


@pytest.mark.parametrize("name", KNOWN)
def test_every_key_and_every_drivers_name_is_a_name(name: str) -> None:
    assert hardware.known(name) is hardware.known(KNOWN[name].name) is KNOWN[name]


def test_cards_that_others_stand_for_have_the_same_machine_code() -> None:
    assert set(REPRESENTATIVES) | set(PROVED_BY) == set(KNOWN)
    for name, others in PROVED_BY.items():
        assert set(others) <= set(REPRESENTATIVES)
        assert {KNOWN[other].sm for other in others} == {KNOWN[name].sm}


def test_a_card_is_described_by_its_numbers() -> None:
    gpu = hardware.from_spec("capability=12.0, sms=84, gbs=960, gib=16")
    assert (gpu.sm, gpu.num_sms, gpu.bandwidth_gbs, gpu.memory_bytes) == (120, 84, 960, 16 * GIB)
    assert gpu.family is KNOWN["rtx5090"].family
    assert gpu.peak.bf16 == pytest.approx(KNOWN["rtx5080"].peak.bf16, rel=0.1)
    assert hardware.card_name(gpu) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not KEY=NUMBER"),
        ("5090", "is not KEY=NUMBER"),
        ("sms=84,gbs=fast,gib=16,capability=12.0", "'gbs=fast' is not KEY=NUMBER"),
        ("sms=84,gbs=960,gib=16", "must give sms, gbs, gib, capability, each once"),
        ("sms=84,sms=84,gbs=960,gib=16,capability=12.0", "each once"),
        ("sms=84,gbs=960,gib=16,capability=12.0,l2=64", "must give"),
        ("sms=84,gbs=960,gib=16,capability=7.5", "capability 7.5 is not one of 8.0, 8.6"),
        ("sms=84,gbs=960,gib=16,capability=120", "capability 120 is not one of"),
        ("sms=84.5,gbs=960,gib=16,capability=12.0", "whole number from 1 to 1000"),
        ("sms=0,gbs=960,gib=16,capability=12.0", "whole number"),
        ("sms=84,gbs=nan,gib=16,capability=12.0", "gbs from 1 to 100000"),
        ("sms=84,gbs=960,gib=inf,capability=12.0", "gib from 1 to 10000"),
    ],
)
def test_a_bad_description_says_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(BadSetting, match=reason):
        hardware.from_spec(text)
