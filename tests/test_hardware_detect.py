"""What detect() reads from an operating system, CUDA and NVML, from copies of what they say on other machines."""

import os
import sys
from types import SimpleNamespace

import pytest

from lecture_lib.hardware import detect
from lecture_lib.hardware.detect import (
    Cache,
    Gpu,
    Machine,
    _c_library_caches,
    _cores,
    _count,
    _kernel_size,
    _linux,
    _macos,
    describe,
    links_between,
    size,
)


def test_this_machine():
    machine = detect()
    assert 1 <= machine.cores <= os.cpu_count()
    assert machine.cpu and machine.memory_bytes > 2**28
    levels = [cache.level for cache in machine.caches]
    assert levels == sorted(levels)
    sizes = [cache.nbytes for cache in machine.caches]
    assert sizes == sorted(sizes) and all(cache.shared_by >= 1 for cache in machine.caches)


def test_linux(tmp_path):
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 3.0GHz\n\nprocessor\t: 1\n")
    files = [("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"), ("2", "Unified", "2048K", "0-1")]
    files.append(("3", "Unified", "105M", "0-3,8-11"))
    for i, contents in enumerate(files):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{i}"
        folder.mkdir(parents=True)
        for name, text in zip(("level", "type", "size", "shared_cpu_list"), contents):
            (folder / name).write_text(text + "\n")
    model, caches = _linux(tmp_path)
    assert model == "Some CPU @ 3.0GHz"
    assert caches == (Cache(1, 48 * 2**10, 1), Cache(2, 2 * 2**20, 2), Cache(3, 105 * 2**20, 8))


def test_linux_that_shows_nothing(tmp_path):
    model, caches = _linux(tmp_path)
    assert model
    assert caches == _c_library_caches()


def test_numbers_as_the_kernel_writes_them():
    assert [_kernel_size(text) for text in ("32K", "1M", "512")] == [32768, 2**20, 512]
    assert [_count(text) for text in ("0", "0-3", "0-3,8", "1,3,5")] == [1, 4, 5, 3]


def test_cores_that_a_container_grants(tmp_path):
    quota = tmp_path / "cpu.max"
    allowed = _cores(tmp_path / "none")
    for text, cores in (
        ("max 100000", allowed),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9900000 100000", allowed),
    ):
        quota.write_text(text)
        assert _cores(quota) == cores


def test_mac_with_an_apple_chip():
    answers = {
        "machdep.cpu.brand_string": "Apple M3 Pro",
        "hw.perflevel0.l1dcachesize": "131072",
        "hw.l1dcachesize": "65536",
        "hw.perflevel0.l2cachesize": "16777216",
        "hw.perflevel0.cpusperl2": "6",
        "hw.logicalcpu": "12",
    }
    model, caches = _macos(lambda name: answers.get(name, ""))
    assert model == "Apple M3 Pro"
    assert caches == (Cache(1, 128 * 2**10, 1), Cache(2, 16 * 2**20, 6))


def test_mac_with_an_intel_chip():
    answers = {
        "hw.l1dcachesize": "32768",
        "hw.l2cachesize": "262144",
        "hw.l3cachesize": "8388608",
        "hw.logicalcpu": "8",
    }
    _, caches = _macos(lambda name: answers.get(name, ""))
    assert caches == (Cache(1, 32 * 2**10, 1), Cache(2, 2**18, 1), Cache(3, 8 * 2**20, 8))


# ---- GPUs ------------------------------------------------------------------------------------------------------------


class Nvml:
    """The part of NVML that links_between calls, for a made-up board. ``nvlinks[gpu]`` lists for each link a GPU,
    "switch", or None for a link that is off; ``pcie[i, j]`` is the lowest common ancestor of two GPUs."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50

    class NVMLError(Exception):
        pass

    def __init__(self, nvlinks, pcie=None):
        self.nvlinks, self.pcie = nvlinks, pcie or {}

    def _link(self, gpu, link):
        if link >= len(self.nvlinks[gpu]):
            raise self.NVMLError("Not Supported")
        return self.nvlinks[gpu][link]

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=f"00000000:{gpu:02X}:00.0")

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        return int(self._link(gpu, link) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return 2 if self._link(gpu, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return self.nvmlDeviceGetPciInfo(self._link(gpu, link))

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.pcie[min(one, other), max(one, other)]


def test_links_through_nvswitch():
    nvml = Nvml([["switch"] * 18] * 8)
    matrix = links_between(list(range(8)), nvml)
    assert all(matrix[i][j] == ("X" if i == j else "NV18") for i in range(8) for j in range(8))


def test_direct_links_and_pcie():
    nvlinks = [[1, 1, None], [0, 0], [3], [2], []]
    pcie = {(0, 2): 10, (0, 3): 20, (1, 2): 30, (1, 3): 40, (0, 4): 50, (1, 4): 50, (2, 4): 50, (3, 4): 0}
    matrix = links_between([0, 1, 2, 3, 4], Nvml(nvlinks, pcie))
    assert matrix == (
        ("X", "NV2", "PIX", "PXB", "SYS"),
        ("NV2", "X", "PHB", "NODE", "SYS"),
        ("PIX", "PHB", "X", "NV1", "SYS"),
        ("PXB", "NODE", "NV1", "X", "PIX"),
        ("SYS", "SYS", "SYS", "PIX", "X"),
    )


def test_links_by_handle_not_by_number():
    nvml = Nvml([["switch"], ["switch"], []], {(0, 2): 50, (1, 2): 40})
    assert links_between([2, 0], nvml) == (("X", "SYS"), ("SYS", "X"))


@pytest.mark.skipif(sys.platform != "linux", reason="NVIDIA's bindings are for Linux here")
def test_the_real_bindings_have_every_name_that_the_copy_has():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in dir(Nvml) if name.startswith(("NVML_", "nvml")) or name == "NVMLError"]
    missing = [name for name in names if not hasattr(pynvml, name)]
    assert missing == []
    assert pynvml.NVML_TOPOLOGY_SYSTEM == 50 and pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH == 2


def machine(gpus: int) -> Machine:
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        multi_processor_count=132,
        L2_cache_size=50 * 2**20,
        total_memory=85_000_000_000,
        major=9,
        minor=0,
    )
    found = tuple(describe(i, properties) for i in range(gpus))
    links = tuple(tuple("X" if i == j else "NV18" for j in range(gpus)) for i in range(gpus))
    return Machine("Some <CPU>", 8, 64 * 2**30, (Cache(1, 49152, 1), Cache(3, 2**25, 8)), found, links)


def test_table():
    assert str(machine(2)) == (
        "this machine: Some <CPU>, 2 GPUs\n"
        "  cores for this process  8\n"
        "  L1 cache                48 KiB for each core\n"
        "  L3 cache                32 MiB for all cores\n"
        "  memory                  64 GiB\n"
        "  GPU 0                   NVIDIA H100 80GB HBM3: 132 SMs, L2 50 MiB, HBM 79.2 GiB, compute capability 9.0\n"
        "  GPU 1                   NVIDIA H100 80GB HBM3: 132 SMs, L2 50 MiB, HBM 79.2 GiB, compute capability 9.0\n"
        "  links of GPU 0          X     NV18\n"
        "  links of GPU 1          NV18  X"
    )
    assert "no GPU" in str(machine(0)) and "1 GPU\n" in str(machine(1))
    assert "links" not in str(machine(1))


def test_html_says_the_same():
    page = machine(2)._repr_html_()
    assert "Some &lt;CPU&gt;" in page and "<CPU>" not in page
    assert page.count("<tr>") == 1 + len(machine(2).rows())


def test_description_of_a_gpu():
    assert machine(1).gpus == (Gpu(0, "NVIDIA H100 80GB HBM3", 132, 50 * 2**20, 85_000_000_000, "9.0"),)


def test_sizes():
    sizes = {
        512: "512 bytes",
        32768: "32 KiB",
        1280 * 2**10: "1.25 MiB",
        24 * 2**30: "24 GiB",
        2000 * 2**30: "2000 GiB",
    }
    assert {nbytes: size(nbytes) for nbytes in sizes} == sizes
