"""What this machine is said to be, what is chosen on it, and what is remembered of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_heads.machine import choice, devices, facts, measurements, products
from medusa_heads.machine.choice import choose, fastest_threads, speeds
from medusa_heads.machine.devices import computes_in, find_device
from medusa_heads.machine.facts import describe_machine, machine_facts
from medusa_heads.machine.products import THREAD_VARIABLES, Shape, thread_counts
from tests.machine.small import BF16, CPU, FAST_BF16, SLOW_BF16, SMALL, store_of


def test_the_facts_are_plain_and_stay_the_same() -> None:
    told = machine_facts()
    assert json.loads(json.dumps(told)) == told == machine_facts()
    assert told["cpu"] and told["cores"] >= 1 and told["torch"] == torch.__version__
    assert told["capability"] == torch.backends.cpu.get_cpu_capability()
    told["cores"] = 0  # a copy
    assert machine_facts()["cores"] >= 1
    assert set(told) < set(describe_machine())


@pytest.mark.parametrize(
    ("lines", "cpu", "instructions"),
    [
        (
            "CPU implementer\t: 0x41\nFeatures\t: fp asimd sve bf16\nCPU part\t: 0xd40\n",
            "ARM 0x41 0xd40",
            ["asimd", "bf16", "sve"],
        ),
        ("model name\t: A CPU\nflags\t\t: fpu avx2\n", "A CPU", ["avx2"]),
    ],
)
def test_processors_are_told_apart(
    lines: str, cpu: str, instructions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured on one serves no other, which may share a home. Linux names none of ARM."""
    (tmp_path / "cpuinfo").write_text(lines)
    monkeypatch.setattr(facts, "_CPUINFO", tmp_path / "cpuinfo")
    found = facts._facts.__wrapped__()
    assert (found["cpu"], found["instructions"]) == (cpu, instructions)


@pytest.mark.parametrize("failed", [OSError("Load averages are unobtainable"), None])
def test_a_system_that_tells_no_load(
    failed: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux without /proc does not, nor Windows."""

    def getloadavg() -> None:
        raise failed or AttributeError

    monkeypatch.setattr("os.getloadavg", getloadavg, raising=False)
    if failed is None:
        monkeypatch.delattr("os.getloadavg")
    monkeypatch.setattr(measurements, "_waited", lambda: None)
    assert describe_machine()["load_average"] is None
    assert not measurements.Contention().seen()


def test_the_cache_is_in_the_users_home_where_its_variable_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sets it may be no shell, and a folder called ~ is soon removed, and the home with it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", "~/kept")
    assert measurements.measurement_folder() == tmp_path / "kept"
    monkeypatch.delenv("MEDUSA_HEADS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/kept")
    assert measurements.measurement_folder() == tmp_path / "kept" / "medusa_heads"


def test_no_more_threads_than_a_container_may_run(
    cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes by the machine's cores, and a moment is no time to see that they are withheld."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(products, "usable_cores", lambda: 1)
    assert thread_counts(CPU) == [1] and thread_counts(torch.device("cuda")) == [64]
    assert choose("decode", dtype="float32", shape=SMALL, device="cpu").threads == 1
    monkeypatch.setattr(products, "usable_cores", lambda: 3)
    assert thread_counts(CPU) == [1, 2, 3]
    monkeypatch.setenv(THREAD_VARIABLES[0], "64")
    assert thread_counts(CPU) == [64]


def test_the_best_device_that_is_here() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.backends.mps.is_available() and not torch.xpu.is_available():
        assert find_device().type == find_device(None).type == here
    assert find_device("cpu") == find_device(CPU) == CPU


def test_of_several_gpus_each_has_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one beside a newer one, which is the current one."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def supported(including_emulation: bool = True) -> bool:
        return current[-1].index == 0

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert [computes_in(torch.device("cuda", n), BF16) for n in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("free", "device", "on"),
    [
        ({"cuda": 90, 0: 90, 1: 99}, "cuda", ""),
        ({"cuda": 3, 0: 3, 1: 50, 2: 70, 3: 1}, "cuda:2", "; on cuda:2, because cuda has 3 GB"),
        ({"cuda": 3, 0: 3, 1: 5}, "cpu", "; on the CPU, because cuda has 3 GB"),
        ({"cuda": 3, 0: 3}, "cpu", "; on the CPU, because cuda has 3 GB"),
    ],
)
def test_weights_go_where_there_is_room(
    free: dict[Any, int], device: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the current GPU, else on that of the others which has most of it; one does not work."""

    def free_memory(where: torch.device) -> int:
        return free[str(where) if where.index is None else where.index] * 10**9

    def failure(where: torch.device) -> Exception | None:
        return RuntimeError("no kernel image") if where.index == 1 else None

    monkeypatch.setattr(choice, "find_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(choice, "free_memory", free_memory)
    monkeypatch.setattr(devices, "_failure", failure)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free) - 1)
    large = Shape(vocab=10**7, hidden=1024)  # 41 GB
    where, remark = choice._place(None, large, BF16)
    assert where == torch.device(device) and remark.startswith(on) and bool(remark) == bool(on)


@pytest.mark.parametrize("asked", ["abacus", ""])
def test_a_device_that_there_is_none_of(asked: str) -> None:
    with pytest.raises(ValueError, match="expected a device such as cpu or cuda, got") as told:
        find_device(asked)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("asked", ["meta", "cuda:99", "hpu", "vulkan", "xla"])
def test_a_device_that_is_not_here(asked: str) -> None:
    beginning = rf"the device '{asked}' cannot be used here \(.+\): leave device out, or give one"
    with pytest.raises(ValueError, match=beginning) as told:
        find_device(asked)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("dtype", ["float33", "int8", "Tensor", "float8_e4m3fn", torch.int32])
def test_a_dtype_that_cannot_be_had(dtype: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"expected a dtype such as|does not compute in"):
        choose("tree", dtype=dtype, shape=SMALL)


def test_a_low_precision_is_chosen_where_it_is_faster(cache: Path) -> None:
    store_of(FAST_BF16)
    chosen = choose("tree", stored=BF16, shape=SMALL, device="cpu")
    assert chosen.dtype == BF16
    assert chosen.reason == "bfloat16: this CPU multiplies it at 2.5 times float32's speed"
    assert str(chosen) == f"cpu, 1 thread, {chosen.reason}"
    store_of(SLOW_BF16)
    chosen = choose("tree", stored=BF16, shape=SMALL, device="cpu")
    assert chosen.dtype == torch.float32
    assert chosen.reason == "float32: this CPU multiplies bfloat16 at 0.2 of float32's speed"
    relative = speeds("tree", stored=BF16, shape=SMALL, device="cpu")
    assert relative == {("float32", 1): 1.0, ("bfloat16", 1): pytest.approx(0.2)}


def test_a_gain_within_noise_is_none(cache: Path) -> None:
    store_of({"float32 1": 0.0105, "bfloat16 1": 0.01})
    chosen = choose("tree", stored=BF16, shape=SMALL, device="cpu")
    assert chosen.dtype == torch.float32
    assert chosen.reason == "float32: bfloat16 is not faster on this CPU"


def test_weights_are_never_rounded_by_choice(cache: Path) -> None:
    store_of(FAST_BF16)
    chosen = choose("tree", stored=torch.float32, shape=SMALL, device="cpu")
    assert chosen.dtype == torch.float32 and "as its weights are stored" in chosen.reason
    assert choose("tree", shape=SMALL, device="cpu").dtype == BF16


def test_what_the_user_gave_beats_the_measurement(cache: Path) -> None:
    store_of(SLOW_BF16)
    chosen = choose("tree", dtype="bfloat16", shape=SMALL, device="cpu")
    assert (chosen.dtype, chosen.reason) == (BF16, "bfloat16 as asked")
    chosen = choose("tree", dtype="auto", stored=BF16, shape=SMALL, device="cpu")
    assert chosen.dtype == torch.float32


def test_weights_that_do_not_fit_memory_stay_short(cache: Path) -> None:
    huge = Shape(SMALL.hidden, SMALL.intermediate, vocab=10**13, layers=SMALL.layers)
    store_of(SLOW_BF16)
    chosen = choose("tree", stored=BF16, shape=huge, device="cpu")
    assert chosen.dtype == BF16 and "GB of memory that are free" in chosen.reason


def test_autocast_takes_the_dtype_that_trains_faster(cache: Path) -> None:
    store_of(FAST_BF16, "train")
    assert choose("train", shape=SMALL, device="cpu").dtype == BF16
    store_of(SLOW_BF16, "train")
    assert choose("train", shape=SMALL, device="cpu").dtype == torch.float32


@pytest.mark.parametrize(("bf16", "rounds"), [(0.0014, 9), (0.0016, 4), (0.0006, 4)])
def test_as_many_rounds_as_decide(
    bf16: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, clock = Counter[str](), {"now": 0.0}
    takes = {"float32": 0.001, "bfloat16": bf16}

    def one_pass(use: Any, device: Any, dtype: str, shape: Any) -> Any:
        def run() -> None:
            passes[dtype] += 1
            clock["now"] += takes[dtype]

        return run

    told = SimpleNamespace(thread_time=lambda: clock["now"], perf_counter=lambda: clock["now"])
    monkeypatch.setattr(products, "time", told)
    monkeypatch.setattr(products, "_pass", one_pass)
    found, _ = products.measure("tree", CPU, list(takes), [1], SMALL)
    assert found == pytest.approx({(dtype, 1): seconds for dtype, seconds in takes.items()})
    assert passes == dict.fromkeys(takes, rounds + 1)  # and one that compiles a kernel


def test_eight_bits_that_are_far_slower_for_one_row_are_not_timed_for_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_int8_products", lambda: True)
    asked = []

    def seconds(use: str, device: Any, dtypes: list[str], shape: Any) -> dict[Any, float]:
        asked.append(use)
        threads = torch.get_num_threads()
        return {("float32", threads): 1.0, ("int8", threads): {"decode": takes, "draft": 0.5}[use]}

    monkeypatch.setattr(products, "product_seconds", seconds)
    takes = 2.5
    assert products.int8_gain(torch.float32) == 0.4 and asked == ["decode"]
    takes = 1.5
    assert products.int8_gain(torch.float32) == 1.0 and "draft" in asked


def test_fewer_threads_where_they_are_clearly_faster() -> None:
    def best(one: float, two: float, four: float) -> int | None:
        return fastest_threads(
            {("float32", 1): one, ("float32", 2): two, ("float32", 4): four}, "float32"
        )

    assert best(1.0, 2.0, 4.0) == 1
    assert best(4.0, 2.0, 3.0) == 2
    assert best(0.95, 1.1, 1.0) == 4  # within noise: as torch has it
    assert fastest_threads({}, "float32") is None


def test_sizes_of_a_target(tiny_llama: Any) -> None:
    config = tiny_llama(num_layers=3).config
    assert Shape.of(config) == Shape(hidden=64, intermediate=128, vocab=199, layers=3)
    assert Shape.of(object()) == Shape(intermediate=4 * Shape.hidden)
