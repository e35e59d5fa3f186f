"""The machine's facts, and the limits that containers set, read from made-up /proc and /sys trees."""

import subprocess
import sys

import psutil
import pytest

from quengine.platform import machine

GIB = 2**30


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An empty /proc and /sys; write(path, text) fills them."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYS", tmp_path / "sys")
    machine.cpu_model.cache_clear()
    machine.simd_features.cache_clear()

    def write(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    yield write
    machine.cpu_model.cache_clear()
    machine.simd_features.cache_clear()


def cores(write, siblings):
    for cpu, text in enumerate(siblings):
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text + "\n")


def test_the_cgroup_2_limit_of_a_parent_group_counts(tree):
    tree("proc/self/cgroup", "0::/jobs/one\n")
    tree("sys/fs/cgroup/jobs/one/memory.max", "max\n")
    tree("sys/fs/cgroup/jobs/one/memory.current", "0\n")
    tree("sys/fs/cgroup/jobs/memory.max", f"{GIB}\n")
    tree("sys/fs/cgroup/jobs/memory.current", f"{GIB // 2}\n")
    tree("sys/fs/cgroup/jobs/memory.stat", f"anon 5\nactive_file {GIB // 8}\ninactive_file {GIB // 8}\n")
    assert machine.total_memory() == GIB
    assert machine.available_memory() == 3 * GIB // 4


def test_the_cgroup_1_limit_counts_and_its_unlimited_value_does_not(tree):
    tree("proc/self/cgroup", "4:cpu,cpuacct:/\n3:memory:/job\n")
    tree("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    tree("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    tree("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{GIB}\n")
    tree("sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{GIB // 4}\n")
    tree("sys/fs/cgroup/memory/job/memory.stat", "total_active_file 0\ntotal_inactive_file 0\n")
    assert machine.total_memory() == GIB
    assert machine.available_memory() == 3 * GIB // 4


def test_a_group_over_its_limit_leaves_nothing_and_never_less(tree):
    tree("proc/self/cgroup", "0::/\n")
    tree("sys/fs/cgroup/memory.max", "1000\n")
    tree("sys/fs/cgroup/memory.current", "5000\n")
    assert machine.available_memory() == 0


def test_without_limits_memory_is_the_machines(tree):
    tree("proc/self/cgroup", "0::/\n")
    assert machine.total_memory() == psutil.virtual_memory().total
    assert 0 < machine.available_memory() <= psutil.virtual_memory().total


def test_threads_of_one_core_count_once(tree, monkeypatch):
    monkeypatch.setattr(machine, "usable_cpus", lambda: {0, 1, 2, 3})
    cores(tree, ["0,2", "1,3", "0,2", "1,3"])
    assert machine.physical_cores() == 2


def test_cores_outside_the_affinity_do_not_count(tree, monkeypatch):
    monkeypatch.setattr(machine, "usable_cpus", lambda: {0, 2})
    cores(tree, ["0,2", "1,3", "0,2", "1,3"])
    assert machine.physical_cores() == 1


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("900000 100000", 4)],
)
def test_the_cpu_quota_of_a_container_bounds_the_cores(tree, monkeypatch, quota, expected):
    monkeypatch.setattr(machine, "usable_cpus", lambda: {0, 1, 2, 3})
    cores(tree, ["0", "1", "2", "3"])
    tree("proc/self/cgroup", "0::/box\n")
    tree("sys/fs/cgroup/box/cpu.max", quota + "\n")
    assert machine.physical_cores() == expected


def test_the_cgroup_1_cpu_quota_bounds_the_cores(tree, monkeypatch):
    monkeypatch.setattr(machine, "usable_cpus", lambda: {0, 1, 2})
    cores(tree, ["0", "1", "2"])
    tree("proc/self/cgroup", "4:cpu:/box\n")
    tree("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "100000\n")
    tree("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    tree("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    tree("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert machine.physical_cores() == 1


def test_numa_nodes_are_those_of_the_usable_processors(tree, monkeypatch):
    monkeypatch.setattr(machine, "usable_cpus", lambda: {1, 9})
    assert machine.memory_nodes() == ()
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
        tree(f"sys/devices/system/node/node{node}/cpulist", cpus + "\n")
    assert machine.memory_nodes() == (0,)
    monkeypatch.setattr(machine, "usable_cpus", lambda: {1, 12})
    assert machine.memory_nodes() == (0, 1)


def test_the_largest_cache_of_a_processor(tree):
    assert machine.largest_cache() == 0
    for index, size in enumerate(("48K", "2048K", "300M", "?")):
        tree(f"sys/devices/system/cpu/cpu0/cache/index{index}/size", size + "\n")
    assert machine.largest_cache() == 300 * 2**20


def test_x86_processors_tell_their_name_and_the_features_that_matter(tree):
    tree("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Fast CPU\nflags\t\t: fpu avx2 avx512_vnni mmx\n")
    assert machine.cpu_model() == "A Fast CPU"
    assert machine.simd_features() == ("avx2", "avx512_vnni")


def test_arm_processors_tell_their_features(tree):
    tree("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    assert machine.simd_features() == ("asimd", "asimddp", "i8mm")


@pytest.mark.usefixtures("tree")
def test_a_machine_that_tells_nothing_still_has_a_name_and_a_core():
    assert machine.cpu_model()
    assert machine.simd_features() == ()
    assert machine.physical_cores() >= 1


def test_peak_memory_grows_with_what_was_touched():
    """In a process that has held little: beyond the peak of this one's tests are gigabytes."""
    code = """
from quengine.platform.machine import peak_memory
before = peak_memory()
held = bytearray(before + 64 * 2**20)
print(before, len(held), peak_memory())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, held, after = map(int, done.stdout.split())
    assert 0 < before < held <= after


@pytest.mark.usefixtures("tree")
def test_peak_memory_without_proc_comes_from_the_kernels_own_count():
    assert machine.peak_memory() > 2**20


def test_memory_bandwidth_is_measured_and_torchs_threads_are_put_back():
    import torch

    before = torch.get_num_threads()
    # Far below any machine: a loaded one may be held up in every pass.
    assert 1e6 < machine.memory_bandwidth(threads=1, seconds=0.01) < 1e13
    assert torch.get_num_threads() == before


def test_no_cuda_device_is_an_empty_list_not_an_error(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.cuda_devices() == []


@pytest.mark.gpu
def test_cuda_devices_tell_their_memory():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for device in machine.cuda_devices():
        assert 0 < device.free_memory <= device.total_memory


def test_asking_for_memory_and_cores_does_not_load_torch():
    code = (
        "import sys; from quengine.platform import machine as m;"
        "m.physical_cores(); m.available_memory(); m.peak_memory(); m.simd_features();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
