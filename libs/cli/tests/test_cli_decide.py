"""`baton decide` before any server: devices, topologies, the servers' commands, and what is refused."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton.bench.decide import judge, load, save
from baton.cli.decide import token_counter
from baton.cli.decide_pool import Pool, is_shared, parse_devices, parse_splits, topologies_of
from baton.cli.errors import UsageError
from baton.cli.fleet import FleetOptions
from baton.cli.services import ServiceSpec
from baton.cli.services.process import ReadyRecord

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = CORES[0], CORES[-1]


def test_a_device_is_cores_or_a_gpu() -> None:
    found = parse_devices(f"cpu:{FIRST}, cuda:3,cpu:{LAST}-{LAST}")
    assert [device.cores for device in found] == [(FIRST,), (), (LAST,)]
    assert found[1].flags == ("--device", "cuda:3")
    assert found[0].flags == ("--device", "cpu", "--threads", "1")


@pytest.mark.parametrize(
    ("text", "said"),
    [("cpu", "'cpu' is no device"), ("gpu:0", "'gpu:0' is no device"), ("cpu:5-4", "ends before it begins"), ("cpu:99999", "has core 99999")],
)
def test_what_is_no_device_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_devices(text)


@pytest.mark.parametrize(("text", "shared"), [("cuda:0,cuda:1", False), ("cuda:0,cuda:0", True), (f"cpu:{FIRST},cpu:{FIRST}", True)])
def test_hardware_in_common_is_noticed(text: str, shared: bool) -> None:
    assert is_shared(parse_devices(text)) is shared


def test_every_split_of_the_devices() -> None:
    found = {topology.name: topology for topology in topologies_of(4, None)}
    assert list(found) == ["one", "copies", "split-1-3", "split-2-2", "split-3-1"]
    assert found["one"].servers == ("plain-0",)
    assert found["copies"].servers == ("plain-0", "plain-1", "plain-2", "plain-3")
    assert found["split-1-3"].servers == ("prefill-0", "decode-1", "decode-2", "decode-3")
    assert found["split-3-1"].servers == ("prefill-0", "prefill-1", "prefill-2", "decode-3")
    assert [topology.name for topology in topologies_of(4, parse_splits("2:2"))] == ["one", "copies", "split-2-2"]


@pytest.mark.parametrize(
    ("num", "splits", "said"), [(1, None, "names 1"), (2, "1:2", "does not share 2 devices out"), (2, "0:2", "does not share 2")]
)
def test_splits_that_cannot_be_are_refused(num: int, splits: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        topologies_of(num, parse_splits(splits))


def test_a_split_is_two_numbers() -> None:
    with pytest.raises(UsageError, match="PREFILL:DECODE"):
        parse_splits("half")


@dataclass
class Started:
    name: str


@dataclass
class Recorder:
    """Takes the place of the supervisor: notes commands, and which of them were started at once."""

    specs: list[ServiceSpec] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)

    def start(self, spec: ServiceSpec) -> Started:
        self.specs.append(spec)
        return Started(spec.name)

    def wait_ready(self, services: list[Started], timeout_s: float) -> dict[str, ReadyRecord]:
        names = [service.name for service in services]
        self.batches.append(names)
        return {name: ReadyRecord(name, name, 1, {"grpc": f"host:{name}"}) for name in names}

    def command(self, name: str) -> tuple[str, ...]:
        return next(spec.command for spec in self.specs if spec.name == name)


def pool_of(devices: str, folder: Path) -> tuple[Pool, Recorder]:
    (folder / "config.json").write_text("{}")
    parsed, recorder = parse_devices(devices), Recorder()
    options = FleetOptions(folder, "m", http_port=0, grpc_port=0, bootstrap_port=0, worker_flags=("--dtype=bfloat16",))
    return Pool(options, parsed, topologies_of(len(parsed), None), recorder), recorder  # type: ignore[arg-type]


def test_a_cpu_server_is_pinned_and_shared_by_the_topologies_that_use_it(tmp_path: Path) -> None:
    pool, recorder = pool_of(f"cpu:{FIRST},cpu:{LAST}", tmp_path)
    assert list(pool.start(["split"], (), lambda _: None)) == ["split-1-1"]
    assert list(pool.start(["one", "copies"], ("--mixed-prompt-tokens", "32"), lambda _: None)) == ["one", "copies"]
    names = [spec.name for spec in recorder.specs]
    assert names == ["prefill-0", "decode-1", "gateway-split-1-1", "plain-0", "plain-1", "gateway-one", "gateway-copies"]
    plain = recorder.command("plain-1")
    assert plain[:4] == (sys.executable, "-m", "baton.cli.services.pinned", str(LAST))
    assert "--mixed-prompt-tokens" in plain
    assert "--mixed-prompt-tokens" not in recorder.command("decode-1")
    assert "--dtype=bfloat16" in plain
    assert recorder.command("gateway-copies")[-2:] == ("--plain", "host:plain-0,host:plain-1")
    assert recorder.command("gateway-split-1-1")[-4:] == ("--prefill", "host:prefill-0", "--decode", "host:decode-1")
    assert [server.device for server in pool.servers] == [f"cpu:{FIRST}", f"cpu:{LAST}"] * 2


def test_servers_on_one_gpu_start_one_after_the_other_and_divide_its_memory(tmp_path: Path) -> None:
    pool, recorder = pool_of("cuda:0,cuda:0", tmp_path)
    pool.start(["split"], (), lambda _: None)
    pool.start(["one", "copies"], (), lambda _: None)
    workers = [batch for batch in recorder.batches if not batch[0].startswith("gateway")]
    assert workers == [["prefill-0"], ["decode-1"], ["plain-0"], ["plain-1"]]
    parts = [spec.command[spec.command.index("--memory-fraction") + 1] for spec in recorder.specs if "--memory-fraction" in spec.command]
    assert parts == ["0.225", "0.450", "0.675", "0.900"]


def test_pinned_stays_on_its_core_and_keeps_its_process() -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.getpid())"
    with subprocess.Popen(
        (sys.executable, "-m", "baton.cli.services.pinned", str(LAST), sys.executable, "-c", code), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.read().split("\n")[0] == f"[{LAST}] {running.pid}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--devices", "tpu:0"), "'tpu:0' is no device"),
        (("--devices", f"cpu:{FIRST}"), "names 1, but must name from 2"),
        (("--workload", "poem"), "workload is 'poem'"),
        (("--attainment", "0"), "--attainment is 0.0"),
        (("--splits", "1:9"), "does not share 2 devices"),
        (("--model", "nowhere"), "no config.json"),
        (("--verdict-of", "."), "decide.json"),
    ],
)
def test_a_mistake_is_one_line_before_any_server(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = arguments if "--model" in arguments else ("--model", str(tmp_path), *arguments)
    devices = () if "--devices" in arguments else ("--devices", f"cpu:{FIRST},cpu:{FIRST}")
    command = (sys.executable, "-m", "baton.cli.main", "decide", *given, *devices, "--out", str(tmp_path / "out"))
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert found.returncode == 1, found.stderr
    assert named in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_is_judged_again_and_not_quoted(tmp_path: Path) -> None:
    record = load(Path(__file__).parents[3] / "docs" / "examples" / "decide.json")
    stale = replace(judge(record), headline="What an earlier version said.")
    save(replace(record, verdict=stale), tmp_path)
    command = (sys.executable, "-m", "baton.cli.main", "decide", "--verdict-of", str(tmp_path))
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.startswith(f"# {judge(record).headline}")


@pytest.mark.parametrize(("flags", "noted"), [((), True), (("--load-format=dummy",), False)])
def test_tokens_are_not_counted_again_where_that_says_nothing(tmp_path: Path, flags: tuple[str, ...], noted: bool) -> None:
    """A tokenizer without a decoder puts spaces between a word's pieces."""
    tokenizer = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    options = FleetOptions(tmp_path, "m", http_port=0, grpc_port=0, bootstrap_port=0, worker_flags=flags)
    count, notes = token_counter(options)
    assert (count, bool(notes)) == (None, noted)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count, notes = token_counter(options)
    assert (count is not None, notes) == (not flags, ())
