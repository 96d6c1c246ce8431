"""Shared by all tests: no network, one thread, caches of their own, and a tiny random Llama.

What takes seconds to import, fixtures import: the process that only hands out the tests reads this
file before the others begin.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

# All of it is read when libraries are imported, here and in the processes that tests start.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="medusa-heads-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MEDUSA_HEADS_CACHE"] = os.environ["HF_HOME"] + "/medusa-heads"
# Inductor keeps code by its graph alone, also for a processor that had longer vectors.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["HF_HOME"] + "/inductor"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a process that helps would import torch first
os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices: more threads only wait for each other
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Where the losslessness suite runs; MEDUSA_HEADS_TEST_DEVICE=cuda proves the same on a GPU.
DEVICE = os.environ.get("MEDUSA_HEADS_TEST_DEVICE", "cpu")

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels for GPUs are imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or models would be loaded onto a GPU by themselves
os.environ["TRITON_CACHE_DIR"] = os.environ["HF_HOME"] + "/triton"

MOST_WORKERS = 8  # each takes 1.5 GB
CACHES = os.environ["HF_HOME"]  # of this process alone; what was kept here before is not read

TinyLlama = Callable[..., Any]  # makes a LlamaForCausalLM, whose methods mypy cannot follow
Refused = Callable[[Callable[[list[str]], int], list[str]], str]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a worker for each core that may be used."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


# Nothing of what is imported, or rewritten for its assertions, is garbage.
gc.disable()
# What a shell starts in the background ignores Ctrl-C, and so would the runs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    """hypothesis spends seconds on numbers in all that is imported, and other runs try others."""
    providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """pytest listens to each logger that hands nothing on. To this one dynamo writes every graph in
    many forms as soon as somebody listens: they take time, and fill the report of a failure."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """A full garbage collection, which each training run asks for, leaves out what was imported.
    Traced graphs make many objects, few of them in circles: the young are looked at less often."""
    gc.freeze()  # a collection before it takes seconds, and finds nothing
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHES, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def long_lived() -> None:
    """Garbage collections, which training runs ask for, leave out what earlier modules keep."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """One thread, which sums in one order; and the environment that libraries hold on to, where
    several processes of `datasets` leave a copy of it."""
    import torch

    environ = os.environ
    yield
    os.environ = environ  # noqa: B003
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    """What is so for all tests of a module is made so once."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True, scope="module")
def pictures(module_patch: pytest.MonkeyPatch) -> None:
    """No report draws any: those of a tiny training run take four times as long as itself."""
    module_patch.setattr("medusa_heads.training.measure.report.draw_plots", lambda *_: [])
    module_patch.setattr("medusa_heads.inference.bench.report.draw", lambda *to: to[-1].touch())


@pytest.fixture(autouse=True, scope="module")
def quick_kernels(module_patch: pytest.MonkeyPatch) -> None:
    """Large matrices of heads are multiplied in eight bits, and a target's are packed, whatever is
    measured here; also of models that the tests of a module share. Steps are timed in one round."""
    from medusa_heads.machine.kernels import has_packed_products

    module_patch.setattr("medusa_heads.heads.drafting.int8_gain", lambda _: 2.0)
    module_patch.setattr("medusa_heads.heads.drafting.has_int8_products", lambda: True)
    gain = "medusa_heads.target.packed.matrices.{}_gain".format
    module_patch.setattr(gain("packed"), lambda dtype, *_: 2.0 * has_packed_products(dtype))
    module_patch.setattr(gain("turned"), lambda *_: 2.0)
    module_patch.setattr(gain("forward"), lambda *_: 2.0)
    module_patch.setattr("medusa_heads.inference.adapt.step_bench._ROUNDS", 1)


@pytest.fixture(autouse=True, scope="module")
def part_of_the_library(module_patch: pytest.MonkeyPatch) -> None:
    """A tenth of the library's files: it takes seconds to find every line of all of them."""
    from medusa_heads.data import corpus

    read = corpus._read_sources

    def some(root: Path, *, held_out: bool) -> Iterator[dict[str, str]]:
        return islice(read(root, held_out=held_out), 0, None, 1 if held_out else 10)

    module_patch.setattr(corpus, "_read_sources", some)


@pytest.fixture(autouse=True, scope="module")
def durable(module_patch: pytest.MonkeyPatch) -> None:
    """Nothing: no test pulls the plug, and each wait for the disk takes as long as a small step."""
    module_patch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for one test alone, which is not there yet."""
    folder = tmp_path_factory.mktemp("one-test") / "cache"
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(folder))
    return folder


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program has the processors, and no round is unlike the others, however busy this
    machine is: what is measured is kept."""
    from medusa_heads.machine import measurements, products

    monkeypatch.setattr(measurements, "_waited", lambda: 0.0)
    monkeypatch.setattr(products, "_spread", lambda _: 0.0)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever somebody looks, threads have waited for a processor for an hour more."""
    from medusa_heads.machine import measurements

    waited = count(step=3600.0)
    monkeypatch.setattr(measurements, "_waited", lambda: next(waited))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command with a user's mistake: exit code 2, and one sentence, which is returned."""

    def run(main: Callable[[list[str]], int], flags: list[str]) -> str:
        capsys.readouterr()  # what the test did before
        assert main(flags) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert "Traceback" not in printed.err
        return printed.err

    return run


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read in part caches of any size, as they read large ones."""
    from medusa_heads.target import attention

    monkeypatch.setattr(attention, "LARGE", 0)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled targets keep their fixed shapes, masks and caches, and are spared the seconds that
    tracing takes: for what depends on these alone."""
    monkeypatch.setattr("torch.compile", lambda forward, **_: forward)


@pytest.fixture
def split_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs attend by the kernel for GPUs, whatever is faster here."""
    import torch

    from medusa_heads.machine.attention import Attended
    from medusa_heads.target import attention

    def pays(device: torch.device, dtype: torch.dtype, numbers: tuple[int, ...]) -> bool:
        sizes = Attended(*numbers)
        return device.type == "cpu" and dtype.is_floating_point and 0 < sizes.tokens <= sizes.slots

    torch.compiler.assume_constant_result(pays)
    monkeypatch.setattr(attention, "split_pays", pays)
    monkeypatch.setattr(attention, "LARGE", float("inf"))


@pytest.fixture(autouse=True, scope="module")
def as_they_are(module_patch: pytest.MonkeyPatch) -> None:
    """Steps are recorded on a GPU where a test says so, by `recorded`: others are of what is
    decoded without. And no clock says when forwards become scripts."""
    for each in ["compiling.captures"] * (DEVICE != "cpu") + ["scripting.Scripting._begins"]:
        module_patch.setattr(f"medusa_heads.inference.models.{each}", lambda *_: False)


@pytest.fixture
def recorded(as_they_are: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps are recorded by default, where there is no GPU by what stands for it; an entry for
    every recording that is asked for, which it does not keep alive."""
    from medusa_heads.inference.models import compiling
    from medusa_heads.target.graphs import captured
    from tests.replayed import Replayed

    monkeypatch.setattr(compiling, "captures", captured.captures)
    if DEVICE == "cpu":
        for gain in ("packed", "turned"):
            monkeypatch.setattr(f"medusa_heads.target.packed.matrices.{gain}_gain", lambda *_: 0)
        monkeypatch.setattr(captured, "Recording", Replayed)
        monkeypatch.setattr("torch.cuda.graph_pool_handle", object)
        monkeypatch.setattr(captured, "records", lambda _: True)
        monkeypatch.setattr(compiling, "captures", lambda _: True)
    made: list[Any] = []
    recording = captured.CapturedTarget.recording

    def counted(*args: Any) -> Any:
        new = recording(*args)
        made.append(new and ref(new))
        return new

    monkeypatch.setattr(captured.CapturedTarget, "recording", counted)
    return made


@pytest.fixture(scope="session")
def tiny_llama() -> TinyLlama:
    """Make a tiny Llama: `tiny_llama(num_layers=2, seed=0, **config overrides)`.

    fp32, vocabulary 199, hidden 64, no end token. Matrices are drawn with a standard deviation of
    0.15, wide enough for peaked and varied predictions; equal arguments give equal weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(num_layers: int = 2, seed: int = 0, **overrides: Any) -> "LlamaForCausalLM":
        settings: dict[str, Any] = {
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        }
        model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).float().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
        return model

    return make
