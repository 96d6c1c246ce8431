"""What matrix products take here: measured once, kept whole, never taken from a damaged file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_heads.machine import measurements
from medusa_heads.machine import products as module
from medusa_heads.machine.choice import choose
from medusa_heads.machine.kernels import has_packed_products
from medusa_heads.machine.measurements import Contention, Measurements, measurement_folder
from medusa_heads.machine.products import Shape, Use, int8_gain, packed_gain, product_seconds
from tests.machine.small import BF16, CPU, SLOW_BF16, SMALL, store_of


@pytest.fixture
def waits(quiet: None, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Seconds that threads have waited, as they are asked for, however busy this machine is; once
    all were given, no thread waits any more."""
    given: list[float | None] = []
    monkeypatch.setattr(measurements, "_waited", lambda: given.pop(0) if given else 0.0)
    return given


@pytest.mark.parametrize("use", ["decode", "tree", "batch", "train"])
def test_measured_once_and_kept(use: Use, cache: Path, waits: list[float | None]) -> None:
    before = torch.get_num_threads()
    first = product_seconds(use, CPU, ["float32", "bfloat16"], SMALL)
    assert set(first) == {("float32", 1), ("bfloat16", 1)} and min(first.values()) > 0
    assert torch.get_num_threads() == before
    (file,) = (cache / "products").iterdir()
    written = file.read_bytes()
    module._known.clear()  # as in another process
    assert product_seconds(use, CPU, ["bfloat16", "float32"], SMALL) == first
    assert file.read_bytes() == written


def test_what_eight_bits_bring_is_measured_and_kept(
    cache: Path, waits: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SQUARE", SMALL)
    monkeypatch.setattr(module, "_HOPELESS_GAIN", 0.0)  # wherever this runs
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with torch.autocast("cpu", torch.bfloat16):  # of whoever loads heads
        assert int8_gain(torch.float32) > 0
    module._known.clear()  # as in another process
    files = sorted((cache / "products").iterdir())
    assert len(files) == 2  # one row, and some
    for file, int8 in zip(files, (0.001, 0.004), strict=True):
        stored = json.loads(file.read_text())
        assert stored["values"]["seconds"].keys() == {"float32 1", "int8 1"}
        stored["values"]["seconds"] = {"float32 1": 0.001, "int8 1": int8}
        file.write_text(json.dumps(stored))
    assert int8_gain(torch.float32) == pytest.approx(2 / 5)


@pytest.mark.skipif(not has_packed_products(torch.float32), reason="torch packs no matrix here")
def test_what_packed_matrices_bring_is_measured_and_kept(
    cache: Path, waits: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packed_gain(torch.float32, 64, 32) > 0
    module._known.clear()  # as in another process
    (file,) = (cache / "products").iterdir()
    stored = json.loads(file.read_text())
    assert stored["values"]["seconds"].keys() == {"float32 1", "packed float32 1"}
    stored["values"]["seconds"] = {"float32 1": 0.003, "packed float32 1": 0.002}
    file.write_text(json.dumps(stored))
    assert packed_gain(torch.float32, 64, 32) == pytest.approx(1.5)
    assert packed_gain(torch.float64, 64, 32) == 0.0
    with torch.backends.mkldnn.flags(enabled=False):
        assert packed_gain(torch.float32, 64, 32) == 0.0


def test_a_processor_without_a_kernel_for_eight_bits_is_not_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert int8_gain(torch.float32) == 0.0 and not (cache / "products").exists()


def test_what_a_busy_machine_says_is_for_this_process_alone(
    cache: Path, waits: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = ["float32", "bfloat16"]

    def measured_and_kept() -> tuple[bool, bool]:
        module._known.clear()  # as in another process
        began = dict(product_seconds("tree", CPU, dtypes, SMALL))
        assert product_seconds("tree", CPU, dtypes, SMALL) == began  # not measured twice
        return not waits, (cache / "products").exists()

    waits += [0.0, 9.0]  # others had the processor
    assert measured_and_kept() == (True, False)
    waits += [None, None]  # the system does not say how long threads wait
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0), raising=False)
    assert measured_and_kept() == (True, False)
    monkeypatch.setattr(module, "_spread", lambda _: 3.0)  # rounds disagree
    waits += [9.0, 9.0]
    assert measured_and_kept() == (True, False)
    monkeypatch.setattr(module, "_spread", lambda _: 0.0)
    waits += [9.0, 9.0]
    assert measured_and_kept() == (True, True)
    waits += [0.0, 9.0]
    assert measured_and_kept() == (False, True)  # read, not measured again


def test_waiting_for_a_processor_makes_nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had to wait each time is the fastest all the same."""
    clock = {"perf_counter": 0.0, "thread_time": 0.0}

    def one_pass(use: Use, device: torch.device, dtype: str, shape: Shape) -> Callable[[], None]:
        def products() -> None:
            own = {"float32": 0.001, "bfloat16": 0.04}[dtype]
            clock["thread_time"] += own
            clock["perf_counter"] += own + (0.2 if dtype == "float32" else 0)

        return products

    clocks = {name: partial(clock.__getitem__, name) for name in clock}
    monkeypatch.setattr(module, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(module, "_pass", one_pass)
    seconds, _ = module.measure("train", CPU, ["float32", "bfloat16"], [1], SMALL)
    assert seconds == pytest.approx({("float32", 1): 0.001, ("bfloat16", 1): 0.04})


@pytest.mark.skipif(
    measurements._waited() is None, reason="the system does not say how long threads wait"
)
def test_waiting_for_a_processor_is_noticed() -> None:
    """One processor for two programs: each waits about half of the time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = "print(flush=True)\nwhile True: pass"
    try:
        with subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            running.stdout.readline()
            contention, began = Contention(), time.perf_counter()
            while time.perf_counter() < began + 0.2:
                pass
            assert contention.seen()
            running.kill()
    finally:
        os.sched_setaffinity(0, cores)


def test_without_a_home_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user need not be known to it."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("MEDUSA_HEADS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert measurement_folder().is_absolute()


def in_two_processes() -> list[str]:
    """What each of them chooses; they begin at once, with all that was imported here."""
    context = get_context("fork")
    both, said = context.Barrier(2), context.SimpleQueue()

    def chosen() -> None:
        module._known.clear()
        both.wait()
        shape = Shape(32, 64, 128, 2)
        said.put(str(choose("tree", stored=torch.bfloat16, shape=shape, device="cpu")))

    processes = [context.Process(target=chosen) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return [said.get() for _ in processes]


def test_processes_that_measure_at_once_do_not_disturb_each_other(
    cache: Path, waits: list[float | None], capfd: pytest.CaptureFixture[str]
) -> None:
    assert all(said.startswith("cpu, 1 thread, ") for said in in_two_processes())
    assert capfd.readouterr().err == ""
    (kept,) = (cache / "products").iterdir()
    assert set(json.loads(kept.read_text())["values"]["seconds"]) == {"float32 1", "bfloat16 1"}


def test_other_processes_measure_nothing_again(cache: Path) -> None:
    store_of(SLOW_BF16)
    said = in_two_processes()
    assert said[0] == said[1] and "bfloat16 at 0.2 of float32's speed" in said[0]


DAMAGE = {
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "deep": "[" * 100_000,
    "of something else": '{"of": {}, "values": {"seconds": 1}}',
    "no values": None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_no_measurement(
    damage: str | None, cache: Path, waits: list[float | None]
) -> None:
    store = store_of(SLOW_BF16)
    (file,) = (cache / "products").iterdir()
    whole = json.loads(file.read_text())
    facts = whole["of"]["facts"]
    assert store.read("products", facts) == whole["values"]
    file.write_text(json.dumps(whole | {"values": 3}) if damage is None else damage)
    assert store.read("products", facts) is None
    module._known.clear()
    measured = product_seconds("tree", CPU, ["float32", "bfloat16"], SMALL)
    assert measured["float32", 1] != 0.002
    assert store.read("products", facts) is not None  # whole again


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seconds": {}},
        {"seconds": {"float32 1": "x"}},
        {"seconds": None},
        {"seconds": {"float32 1": 10**400, "bfloat16 1": 1.0}},
        {"seconds": {"float32 1": True, "bfloat16 1": 1.0}},
        {"seconds": {"float32 1": float("nan"), "bfloat16 1": 1.0}},
    ],
)
def test_values_of_another_version_are_measured_anew(values: dict[str, Any], cache: Path) -> None:
    store = store_of({})
    (file,) = (cache / "products").iterdir()
    facts = json.loads(file.read_text())["of"]["facts"]
    store.write("products", facts, values)
    measured = product_seconds("tree", CPU, ["float32", "bfloat16"], SMALL)
    assert 0 < measured["float32", 1] < 12


def test_what_is_no_file_is_no_measurement(cache: Path) -> None:
    store = store_of(SLOW_BF16)
    (file,) = (cache / "products").iterdir()
    facts = json.loads(file.read_text())["of"]["facts"]
    file.unlink()
    os.mkfifo(file)  # whoever opens it waits for a writer
    assert store.read("products", facts) is None


@pytest.mark.parametrize(
    "seconds", [-1.0, 0.0, float("inf"), float("nan"), 10**400, True, "0.01", None]
)
def test_times_that_cannot_be_are_measured_anew(seconds: Any, cache: Path) -> None:
    store_of({"float32 1": seconds, "bfloat16 1": 0.01})
    measured = product_seconds("tree", CPU, ["float32", "bfloat16"], SMALL)
    assert 0 < measured["float32", 1] < float("inf")


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.write_text("")  # no folder can be made there, whoever tries
    store = Measurements()
    store.write("kind", {"a": 1}, {"b": 2})
    assert store.read("kind", {"a": 1}) is None
    assert choose("tree", stored=BF16, shape=SMALL, device="cpu").threads >= 1


def test_measurements_are_kept_apart(tmp_path: Path) -> None:
    store = Measurements(tmp_path)
    store.write("a", {"x": 1}, {"value": 1})
    store.write("a", {"x": 2}, {"value": 2})
    store.write("b", {"x": 1}, {"value": 3})
    assert store.read("a", {"x": 1}) == {"value": 1}
    assert store.read("a", {"x": 2}) == {"value": 2}
    assert store.read("b", {"x": 1}) == {"value": 3}
    assert store.read("a", {"x": 3}) is None
    store.write("a", {"x": 1}, {"value": 4})  # the last one stays
    assert store.read("a", {"x": 1}) == {"value": 4}
    odd = {"x": {(1, 2): 1, 3: 2, "a": 3}}  # keys that JSON has not, and that nothing sorts
    store.write("a", odd, {"value": 5})
    assert store.read("a", odd) == {"value": 5}


def test_training_is_timed_with_rows_enough_for_autocast() -> None:
    """Each step casts all weights, for thousands of tokens."""
    assert module.matrices("train", Shape())[0] >= 512
