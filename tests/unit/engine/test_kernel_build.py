"""Building and caching, on a source small enough to compile in seconds."""

import multiprocessing
import shutil

import pytest

from engine.config import EngineConfig
from engine.kernels import build
from engine.model_runner import load_runner
from engine.torch_network import TorchNetwork
from tests.support.tiny_model import make_tiny_model

SMALL = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("answer", [] { return 42; }); }
"""
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A cache of its own, and a source of one function."""
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "small.cpp").write_text(SMALL)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    monkeypatch.setattr(build, "_flags", lambda: ["-O0"])
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path / "cache"))
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


def _load_and_report(start, results):
    start.wait()
    module = build.load()
    results.put(module if isinstance(module, str) else module.answer())


def _load_in_processes(count):
    """In processes of their own, at the same moment: this one goes on to load the real kernels."""
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_load_and_report, args=(start, results)) for _ in range(count)]
    for process in processes:
        process.start()
    start.set()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return answers


@needs_compiler
def test_processes_that_start_together_build_once(small):
    assert _load_in_processes(2) == [42, 42]
    # One directory under the key, none half built.
    assert [path.name for path in build.cache_dir().iterdir() if path.is_dir()] == [build.build_key()]
    library = next((build.cache_dir() / build.build_key()).glob("*.so"))
    before = library.stat().st_mtime_ns
    assert _load_in_processes(1) == [42]
    assert library.stat().st_mtime_ns == before


@needs_compiler
def test_another_source_is_another_build(small):
    before = build.build_key()
    (small / "native" / "small.cpp").write_text(SMALL.replace("42", "43"))
    assert build.build_key() != before


@needs_compiler
def test_a_source_that_does_not_compile_leaves_nothing_and_says_so(small, caplog):
    (small / "native" / "small.cpp").write_text("this is no C++")
    assert isinstance(build.load(), str)
    assert not [path for path in build.cache_dir().iterdir() if path.is_dir()]
    assert "computing in plain torch" in caplog.text


def test_without_a_compiler_the_model_is_computed_in_torch_and_one_line_says_so(small, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = EngineConfig(num_blocks=8, max_model_len=64)
    for _ in range(2):
        runner = load_runner(make_tiny_model(small / "model"), dtype="auto", device="cpu", config=config)
        assert isinstance(runner._network, TorchNetwork)
    assert [record.getMessage() for record in caplog.records] == [
        "no native CPU kernels, computing in plain torch: no C++ compiler (no-such-compiler); install g++ or clang++"
    ]
