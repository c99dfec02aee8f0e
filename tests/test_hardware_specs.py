"""The figures of datasheets: each has a source, none is sparse, none counts both directions of a link."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lecture_lib.hardware import specs
from lecture_lib.hardware.specs import A100, ACCELERATORS, B200, ENERGY, GB200, H100, NETWORKS, TPU_V5P, get, ladder

BY_NAME = pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda accelerator: accelerator.name)

# Dense bf16 FLOP per clock of one SM (its four tensor cores) or compute unit, from the makers' architecture papers; and
# fp32 FLOP per clock of its vector units, two for each multiply-add: 64 of them in an A100, 128 in the others.
PER_CLOCK = {"A100": (2048, 128), "H100": (4096, 256), "H200": (4096, 256), "MI300X": (2048, 256)}
PER_CLOCK |= {"B200": (8192, 256), "GB200": (8192, 256)}

# Bytes/s of one link in one direction: lanes x signalling rate / 8.
PER_LINK = {
    "NVLink 3": 4 * 50e9 / 8,
    "NVLink 4": 2 * 100e9 / 8,
    "NVLink 5": 2 * 200e9 / 8,
    "Infinity Fabric": 16 * 32e9 / 8,
    "ICI": 100e9,
}


def sparse_peaks(a) -> list[str]:
    """Peaks that are not those of dense matrices."""
    if a.fp32 is None:  # a TPU: 4 units of 128 x 128 multiply-adds in each TensorCore, at 1.75 GHz
        return ["bf16"] * (abs(a.bf16 / (a.sm_count * 4 * 128 * 128 * 2 * 1.75e9) - 1) > 0.01)
    matrix, vector = PER_CLOCK[a.name]
    # The clock of the fp32 peak is the fastest one; under full load of the matrix units it may be up to 10 % lower.
    clock = a.fp32 / (a.sm_count * vector)
    expected = {"bf16": 1, "fp16": 1, "fp8": 2, "tf32": 0.5}
    rates = {name: getattr(a, name) / (a.sm_count * clock) for name in expected if getattr(a, name)}
    return [name for name, rate in rates.items() if not 0.9 < rate / (matrix * expected[name]) < 1.01]


def two_way_rates(a) -> list[str]:
    """Rates that are not those of one direction."""
    lanes = {"PCIe Gen4 x16": 16 * 16e9 / 8, "PCIe Gen5 x16": 16 * 32e9 / 8, "NVLink-C2C": 450e9 / 2}
    nics = {"InfiniBand HDR 200": 25e9, "InfiniBand NDR 400": 50e9, "data center network": 6.25e9}
    wrong = ["link_bandwidth"] * (a.link_bandwidth != a.links * PER_LINK[a.link])
    if a.host_link:
        wrong += ["host_bandwidth"] * (not 0.98 <= a.host_bandwidth / lanes[a.host_link] <= 1)
    return wrong + ["nic_bandwidth"] * (a.nic_bandwidth != nics[a.nic])


def unsourced(a) -> list[str]:
    known = [f for f in vars(a) if f not in ("name", "sources") and getattr(a, f) is not None]
    return [figure for figure in known if len(a.sources.get(figure, "")) < 10]


@BY_NAME
def test_every_figure_has_a_source(accelerator):
    assert unsourced(accelerator) == []
    assert set(accelerator.sources) <= set(vars(accelerator))
    assert set(unsourced(replace(accelerator, sources={}))) == set(accelerator.sources)


@BY_NAME
def test_peaks_are_dense(accelerator):
    assert sparse_peaks(accelerator) == []
    for name in ("bf16", "fp16", "fp8", "tf32"):
        if peak := getattr(accelerator, name):
            assert name in sparse_peaks(replace(accelerator, **{name: 2 * peak})), "the test would miss a sparse peak"


@BY_NAME
def test_rates_are_of_one_direction(accelerator):
    assert two_way_rates(accelerator) == []
    for name in ("link_bandwidth", "host_bandwidth", "nic_bandwidth"):
        if one_way := getattr(accelerator, name):
            assert two_way_rates(replace(accelerator, **{name: 2 * one_way})) == [name]


@BY_NAME
def test_chip_makes_sense(accelerator):
    a = accelerator
    if a.fp8:
        assert a.fp8 == pytest.approx(2 * a.bf16, rel=1e-3)
    if a.boost_clock:
        matrix, _ = PER_CLOCK[a.name]
        assert a.bf16 == pytest.approx(a.sm_count * matrix * a.boost_clock, rel=0.002)
    if a.shared_bytes_per_sm:
        assert a.shared_bytes_per_sm <= a.l1_bytes_per_sm
    assert a.memory_bytes % 2**30 == 0


def test_figures_that_people_know():
    assert (H100.memory_bandwidth, H100.link_bandwidth, H100.domain) == (3.35e12, 450e9, 8)
    assert (A100.link_bandwidth, B200.link_bandwidth, GB200.domain) == (300e9, 900e9, 72)
    assert (H100.bf16, B200.bf16, GB200.bf16) == (989.4e12, 2.25e15, 2.5e15)
    assert TPU_V5P.link_bandwidth == 4800e9 / 8
    assert NETWORKS["PCIe Gen5 x16"].bandwidth == pytest.approx(63.0e9, rel=1e-3)
    assert NETWORKS["PCIe Gen4 x16"].bandwidth == pytest.approx(31.5e9, rel=1e-3)
    assert NETWORKS["InfiniBand NDR 400"].bandwidth == NETWORKS["Ethernet 400"].bandwidth == 50e9


@pytest.mark.parametrize(
    "written, name",
    [
        ("H100", "H100"),
        ("h100 sxm", "H100"),
        ("H100SXM5", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("B200", "B200"),
        ("GB200 NVL72", "GB200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPU v5p", "TPU v5p"),
        ("tpuv5p", "TPU v5p"),
    ],
)
def test_names_as_people_and_drivers_write_them(written, name):
    assert get(written).name == name


@pytest.mark.parametrize("written", ["V100", "", "GH200", "H1000", "TPU v5e"])
def test_an_unknown_name_says_what_is_known(written):
    with pytest.raises(KeyError, match="no figures for .* known are A100, H100, H200, B200, GB200, MI300X, TPU v5p"):
        get(written)


@pytest.mark.parametrize("written", ["H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB", "MI300A"])
def test_another_version_is_refused(written):
    with pytest.raises(KeyError, match="another version than the one listed"):
        get(written)


def test_peak_by_number_type():
    import torch

    assert H100.peak("bf16") == H100.peak("bfloat16") == H100.peak(torch.bfloat16) == 989.4e12
    assert H100.peak(torch.float32) == 66.9e12
    assert H100.peak(torch.float8_e4m3fn) == 1978.9e12
    with pytest.raises(ValueError, match="no fp8 peak is published for A100; use one of fp32, tf32, bf16, fp16"):
        A100.peak("fp8")
    with pytest.raises(ValueError, match="no figures for the number type int8"):
        H100.peak("int8")


def test_source_of_a_figure():
    assert H100.source("memory_bandwidth").startswith("NVIDIA H100 datasheet")
    with pytest.raises(KeyError, match="A100 has no figure called 'fp8'"):
        A100.source("fp8")


@BY_NAME
def test_each_step_of_the_ladder_is_slower(accelerator):
    steps = ladder(accelerator)
    assert len(steps) == 7 and all(step.source for step in steps)
    rates = [step.bandwidth for step in steps if step.bandwidth]
    assert rates == sorted(rates, reverse=True) and len(rates) >= 3
    assert all(step.seconds(1e9) == 1e9 / step.bandwidth for step in steps if step.bandwidth)
    assert all(step.seconds() is None for step in steps if not step.bandwidth)


def test_ladder_of_an_h100():
    registers, l1, l2, hbm, link, host, network = ladder(H100)
    assert registers.capacity == 132 * 256 * 2**10
    assert l1.bandwidth == 132 * 128 * 1.83e9
    assert (l2.capacity, hbm.capacity, link.capacity) == (50 * 2**20, 80 * 2**30, 8 * 80 * 2**30)
    assert link.name == "NVLink 4, 8 accelerators" and network.name == "network, InfiniBand NDR 400"
    assert network.seconds(1e9) == 0.02


def test_moving_costs_more_energy_than_computing():
    joules = {energy.name: energy.joules for energy in ENERGY}
    assert joules["read 8 bytes from DRAM"] / joules["multiply two 32-bit floating-point numbers"] > 300
    assert all(energy.source and energy.joules < 1e-8 for energy in ENERGY)
    assert all(energy.joules_per_byte == energy.joules / energy.nbytes for energy in ENERGY if energy.nbytes)
    assert ENERGY[0].joules_per_byte is None


def test_a_figure_with_two_sources_is_a_mistake():
    with pytest.raises(AssertionError, match="two sources"):
        specs._accelerator("X", {"first": dict(bf16=1.0), "second": dict(bf16=2.0)})


def test_importing_is_light():
    code = "import lecture_lib.hardware, sys; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not {"torch", "matplotlib", "pynvml", "triton"} & loaded


def test_hardware_uses_no_other_part_of_the_library():
    files = Path(specs.__file__).parent.glob("*.py")
    imported = {
        name for file in files for name in re.findall(r"^\s*(?:from|import) (lecture_lib\S*)", file.read_text(), re.M)
    }
    assert imported and all(name.startswith("lecture_lib.hardware") for name in imported)
