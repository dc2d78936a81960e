"""Joules: the arithmetic over counters that are made up, whose they are, which GPU CUDA means, and what is said where there are none."""

import asyncio
import ctypes
import dataclasses
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from bench_scheduled_server import Schedule, grpc_server
from decide_records import ONE, cell, copies, record, split, swept

from baton.bench import Asking, Limits, Objectives, WorkloadOptions, load_run, open_target, summarise, summary_markdown
from baton.bench.decide import CellSetting, judge, load, save
from baton.bench.decide.cells import CellPlan, measure_cell
from baton.bench.decide.markdown import decide_markdown
from baton.bench.decide.record import Server, Targets, Topology, roles_of
from baton.bench.energy import DeviceEnergy, Energy, EnergyMeter, EnergySource, IdlePower, metered, spent, total
from baton.bench.errors import BenchFileError, EnergyError
from baton.bench.nvml import NvmlCounter, cuda_uuids, open_counter, open_meter
from baton.bench.report import collect, html_page

ROLES = {"cuda:0": ("prefill",), "cuda:1": ("decode",)}


class Counter:
    """Two GPUs of `watts`, by a clock that a test moves; `broken` devices cannot be read."""

    def __init__(self, watts: Mapping[str, float]) -> None:
        self.watts, self.now_s, self.broken, self.closed = dict(watts), 0.0, set[str](), False

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.watts)

    def read_mj(self, device: str) -> int:
        if device in self.broken:
            raise EnergyError(f"{device}, energy counter: NVML says GPU is lost")
        return 5_000_000 + round(1000 * self.watts[device] * self.now_s)

    def close(self) -> None:
        self.closed = True

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def meter_of(counter: Counter) -> EnergyMeter:
    return EnergyMeter(counter, clock=lambda: counter.now_s)


def used(counter: Counter, seconds: float, roles: Mapping[str, tuple[str, ...]] = ROLES) -> tuple[DeviceEnergy, ...]:
    meter = meter_of(counter)
    before = meter.read()
    counter.sleep(seconds)
    return spent(before, meter.read(), roles)


def test_joules_are_those_of_the_counter_by_role() -> None:
    found = Energy(used(Counter({"cuda:0": 400.0, "cuda:1": 300.0}), 2.0))
    assert found.joules_by_role() == {"prefill": 800.0, "decode": 600.0}
    assert [(one.device, one.seconds) for one in found.devices] == [("cuda:0", 2.0), ("cuda:1", 2.0)]
    assert (found.joules, found.unused_joules) == (1400.0, 0.0)


def test_a_gpu_outside_of_the_topology_is_apart() -> None:
    found = Energy(used(Counter({"cuda:0": 400.0, "cuda:1": 100.0}), 1.0, {"cuda:0": ("plain",)}))
    assert (found.joules_by_role(), found.unused_joules) == ({"plain": 400.0}, 100.0)


def test_copies_are_one_role_and_two_roles_on_one_gpu_are_shared() -> None:
    both = Energy(used(Counter({"cuda:0": 400.0, "cuda:1": 300.0}), 1.0, {"cuda:0": ("plain",), "cuda:1": ("plain",)}))
    assert both.joules_by_role() == {"plain": 700.0}
    shared = Energy(used(Counter({"cuda:0": 400.0}), 1.0, {"cuda:0": ("prefill", "decode")}))
    assert shared.joules_by_role() == {"decode and prefill (shared)": 400.0}


@pytest.mark.parametrize(("watts", "said"), [(0.0, "cuda:0: the energy counter stood still within 2.00 s"), (-3.0, r"ran back by 6.000 J")])
def test_a_zero_is_no_measurement(watts: float, said: str) -> None:
    with pytest.raises(EnergyError, match=said):
        used(Counter({"cuda:0": watts}), 2.0)


def test_idle_power_is_the_mean_of_its_time() -> None:
    counter = Counter({"cuda:0": 75.5, "cuda:1": 80.0})
    assert meter_of(counter).idle_power(3.0, counter.sleep) == (IdlePower("cuda:0", 75.5, 3.0), IdlePower("cuda:1", 80.0, 3.0))


def test_work_is_metered_and_a_counter_that_fails_does_not_end_it() -> None:
    counter = Counter({"cuda:0": 400.0, "cuda:1": 300.0})

    async def work(breaks: str = "") -> str:
        counter.sleep(1.0)
        counter.broken |= {breaks} - {""}
        return "done"

    result, energy = asyncio.run(metered(meter_of(counter), ROLES, work()))
    assert energy is not None
    assert (result, energy.joules) == ("done", 700.0)
    result, energy = asyncio.run(metered(meter_of(counter), ROLES, work("cuda:1")))
    assert (result, energy) == ("done", Energy(missing="cuda:1, energy counter: NVML says GPU is lost"))
    assert asyncio.run(metered(meter_of(counter), ROLES, work()))[1] == energy
    assert asyncio.run(metered(None, ROLES, work())) == ("done", None)


def test_parts_are_added_device_by_device_and_one_that_is_missing_makes_the_whole_missing() -> None:
    part = Energy((DeviceEnergy("cuda:0", ("prefill",), 10.0, 1.0), DeviceEnergy("cuda:1", (), 4.0, 1.0)))
    assert total([]) is None
    assert total([part, part]) == Energy((DeviceEnergy("cuda:0", ("prefill",), 20.0, 2.0), DeviceEnergy("cuda:1", (), 8.0, 2.0)))
    assert total([part, Energy(missing="why")]) == Energy(missing="why")


def test_roles_of_every_topology_by_device() -> None:
    topologies = (ONE, copies(), Topology("split-1-1", "split", 0, 1, 1, ("prefill-0", "decode-1")))

    def servers(first: str, second: str) -> list[Server]:
        places = (("prefill-0", first), ("decode-1", second), ("plain-0", first), ("plain-1", second))
        return [Server(name, name.split("-")[0], device, ()) for name, device in places]

    assert roles_of(topologies, servers("cuda:0", "cuda:1")) == {
        "one": {"cuda:0": ("plain",)},
        "copies": {"cuda:0": ("plain",), "cuda:1": ("plain",)},
        "split-1-1": {"cuda:0": ("prefill",), "cuda:1": ("decode",)},
    }
    assert roles_of(topologies, servers("cuda:0", "cuda:0"))["split-1-1"] == {"cuda:0": ("decode", "prefill")}


class NvmlError(Exception):
    pass


class Library:
    """What of pynvml is used, with the errors that it has."""

    NVMLError = NvmlError

    def __init__(self, mj: Mapping[str, int | None]) -> None:
        self.mj, self.num_open = mj, 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        if name not in self.mj:
            raise NvmlError("Not Found")
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        found = self.mj[handle]
        if found is None:
            raise NvmlError("Not Supported")
        return found


def test_a_counter_asks_the_gpu_with_that_uuid() -> None:
    library = Library({"GPU-a": 1500, "GPU-b": 7})
    counter = NvmlCounter(library, {"cuda:0": "GPU-b", "cuda:1": "GPU-a"})
    assert [counter.read_mj(device) for device in counter.devices] == [7, 1500]
    counter.close()
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("name", "said"), [("MIG-x", "cuda:0, MIG-x: NVML says Not Found"), ("GPU-old", "cuda:0, energy counter: NVML says Not Supported")]
)
def test_a_gpu_without_a_counter_is_told_at_once_and_nvml_given_back(name: str, said: str) -> None:
    library = Library({"GPU-old": None})
    with pytest.raises(EnergyError, match=said):
        NvmlCounter(library, {"cuda:0": name})
    assert library.num_open == 0


def cuda_of(*names: uuid.UUID, code: int = 0) -> SimpleNamespace:
    """CUDA's driver with these GPUs in this order."""

    def count(num: object) -> int:
        ctypes.cast(num, ctypes.POINTER(ctypes.c_int))[0] = len(names)  # type: ignore[arg-type]
        return 0

    def get(handle: object, ordinal: int) -> int:
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_int))[0] = 40 + ordinal  # type: ignore[arg-type]
        return 0

    def name_of(raw: object, handle: ctypes.c_int) -> int:
        ctypes.memmove(raw, names[handle.value - 40].bytes, 16)  # type: ignore[arg-type]
        return 0

    return SimpleNamespace(cuInit=lambda _: code, cuDeviceGetCount=count, cuDeviceGet=get, cuDeviceGetUuid_v2=name_of)


def test_a_device_is_the_gpu_that_cuda_means() -> None:
    """And not the one in that place of the driver's list: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER move them."""
    first, second = uuid.UUID(int=0x11112222333344445555666677778888), uuid.UUID(int=7)
    assert cuda_uuids(["cuda:1", "cuda:0"], cuda_of(first, second)) == {"cuda:1": f"GPU-{second}", "cuda:0": f"GPU-{first}"}
    with pytest.raises(EnergyError, match=r"cuda:2 is not here: CUDA shows 2 GPUs to this process \(see CUDA_VISIBLE_DEVICES\)"):
        cuda_uuids(["cuda:2"], cuda_of(first, second))
    with pytest.raises(EnergyError, match="CUDA's cuInit failed with code 100"):
        cuda_uuids(["cuda:0"], cuda_of(code=100))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_meter(()) == (None, EnergySource("no GPU among the devices"))

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", absent)
        assert open_meter(["cuda:0"])[1].missing == "no NVIDIA driver here (libcuda.so.1: cannot open shared object file)"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnergyError, match=r"nvidia-ml-py is not installed: pip install 'baton-bench\[energy\]'"):
        open_counter(["cuda:0"])


def test_a_gpu_named_twice_is_read_once_and_idle_first(monkeypatch: pytest.MonkeyPatch) -> None:
    name = uuid.UUID(int=9)
    library = Library({f"GPU-{name}": 1000})
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: cuda_of(name))
    assert open_counter(["cuda:0", "cuda:0"]).devices == ("cuda:0",)
    meter, source = open_meter(["cuda:0"], idle_s=0.01)
    assert meter is None
    assert source.missing.startswith("cuda:0: the energy counter stood still")
    assert library.num_open == 1  # the counter that was opened before; the meter has given its own back


SPLIT_USE = Energy((DeviceEnergy("cuda:0", ("prefill",), 60.0, 2.0), DeviceEnergy("cuda:1", ("decode",), 40.0, 2.0)))
ONE_USE = Energy((DeviceEnergy("cuda:0", ("plain",), 150.0, 2.0), DeviceEnergy("cuda:1", (), 20.0, 2.0)))
SOURCE = EnergySource(idle=(IdlePower("cuda:0", 75.0, 3.0), IdlePower("cuda:1", 80.0, 3.0)))


def test_a_decision_tells_joules_per_token_by_role(tmp_path: Path) -> None:
    cells = [cell("one", 2.0, 1.0, energy=ONE_USE), cell("split-1-1", 2.0, 1.0, number=1, energy=SPLIT_USE)]
    cells += [dataclasses.replace(one, number=one.number + 2) for one in cells]
    save(record((ONE, split()), cells, energy=SOURCE), tmp_path)
    found = load(tmp_path)
    assert found.cells == tuple(cells)
    assert found.energy == SOURCE
    verdict = judge(found)
    assert "energy per output token at 2 requests/s: one 1.5 J (plain 1.5); split-1-1 1 J (prefill 0.6, decode 0.4)" in verdict.reasons
    page = decide_markdown(found, verdict)
    assert "| one | 2 | 2 | 200 | 1.5 | plain 1.5 | 0.2 | cuda:0 75, cuda:1 10 |" in page
    assert "| split-1-1 | 2 | 2 | 200 | 1 | prefill 0.6, decode 0.4 | – | cuda:0 30, cuda:1 20 |" in page
    assert "idle, before the servers started: cuda:0 75 W, cuda:1 80 W" in page


def test_where_there_is_no_gpu_it_is_said_once_and_never_a_zero() -> None:
    found = record((ONE, split()), swept({"one": 1.0, "split-1-1": 2.0}), energy=EnergySource("no GPU among the devices"))
    page = decide_markdown(found, judge(found))
    assert [line for line in page.splitlines() if "energy" in line.lower()] == ["* energy: not available: no GPU among the devices"]


def test_cells_that_could_not_be_read_are_counted_and_left_out() -> None:
    lost = cell("one", 2.0, 1.0, number=3, energy=Energy(missing="cuda:0: NVML says GPU is lost"))
    found = record((ONE,), [cell("one", 2.0, 1.0, energy=ONE_USE), lost], energy=SOURCE)
    verdict = judge(found)
    assert "the energy of 1 of 2 cells could not be read, first in cell 3: cuda:0: NVML says GPU is lost" in verdict.diagnoses
    assert "| one | 2 | 1 | 100 | 1.5 |" in decide_markdown(found, verdict)


async def measured_cell(folder: Path, meter: EnergyMeter | None) -> tuple[Path, Energy | None]:
    """A real cell against a real server, metered as `baton decide` does it."""
    setting = CellSetting(
        model="m",
        workload=WorkloadOptions("fixed", prompt_words=3, answer_tokens=6),
        targets=Targets(60_000.0, 60_000.0, 0.9, "given"),
        limits=Limits(),
        count_tokens=None,
        folder=folder,
        session="s",
        started_at="now",
        meter=meter,
        roles={"split-1-1": ROLES},
    )
    async with grpc_server(Schedule(first_s=0.01, gap_s=0.005)) as url:
        target = open_target(url, "completions", Asking("m"))
        try:
            cell = await measure_cell(CellPlan(0, "split-1-1", "bracket", 0, 50.0, 4, 1), target, setting, 0.0, lambda _: None)
        finally:
            await target.aclose()
    assert cell.tokens_reported == 24
    return folder / cell.samples, cell.energy


async def test_a_cell_its_run_file_and_its_report_have_the_joules(tmp_path: Path) -> None:
    counter = Counter({"cuda:0": 600.0, "cuda:1": 300.0})

    class Ticking(EnergyMeter):
        """A second goes by with every reading."""

        def read(self):  # type: ignore[no-untyped-def]
            counter.sleep(1.0)
            return super().read()

    path, energy = await measured_cell(tmp_path, Ticking(counter, clock=lambda: counter.now_s))
    assert energy == Energy((DeviceEnergy("cuda:0", ("prefill",), 600.0, 1.0), DeviceEnergy("cuda:1", ("decode",), 300.0, 1.0)))
    run = load_run(path)
    assert run.energy == energy
    summary = summarise(run, Objectives(1000, 1000))
    assert summary.energy == energy
    text = summary_markdown(summary)
    assert "37.5 J (prefill 25, decode 12.5) per output token" in text
    assert "cuda:0 (prefill): 600 J, 600 W" in text
    report = collect(path.parent)
    section = next(section for section in report.sections if section.title == "Energy")
    assert section.table is not None
    assert section.table.rows[1] == ("split-1-1", "cuda:1", "decode", 300.0, 300.0, 12.5)
    assert "Energy" in html_page(report)


async def test_a_cell_without_a_meter_has_no_energy_and_says_nothing(tmp_path: Path) -> None:
    path, energy = await measured_cell(tmp_path, None)
    assert energy is None
    assert "energy" not in path.read_text()
    assert "nergy" not in summary_markdown(summarise(load_run(path)))


async def test_a_run_whose_counter_failed_says_so_before_its_figures(tmp_path: Path) -> None:
    counter = Counter({"cuda:0": 600.0})
    counter.broken = {"cuda:0"}
    path, energy = await measured_cell(tmp_path, meter_of(counter))
    assert energy == Energy(missing="cuda:0, energy counter: NVML says GPU is lost")
    before = summary_markdown(summarise(load_run(path))).split("## Output tokens")[0]
    assert "energy: not available: cuda:0, energy counter" in before
    path.write_text(path.read_text().replace('"missing"', '"lacking"'))
    with pytest.raises(BenchFileError, match=r":2: the energy has other fields"):
        load_run(path)
