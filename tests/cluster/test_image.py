"""The image, built on a plain Debian made here and run as a user would: losses, arguments and checksums are those of outside."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_train import __version__
from dist_train.launcher.remote import free_port
from tests.cluster.conftest import DIST_TRAIN, ROOT, TOY

pytestmark = pytest.mark.timeout(1500)
IMAGE, BASE = "localhost/dist_train:test", "localhost/dist_train_base:test"
LIBRARY = "/opt/dist_train/lib/python3*/site-packages/dist_train/_csrc.so"
ARGUMENTS = ["a b", "--x=a b", "", "-4C", "$HOME", "*", "a\nb", "é", "'", '"', "\\"]  # those of F31, and quotes
SHOW = "import sys, os; open(f'/runs/{os.environ[\"RANK\"]}', 'w').write(repr(sys.argv[1:]))"


@dataclass(frozen=True)
class Images:
    """podman and buildah with a store of their own, which goes when the tests are over."""

    folder: Path
    runroot: str

    def call(self, program: str, *words: str | Path, seconds: float = 600) -> str:
        """Standard output. Limits are low, so that machines which may not raise them run it too."""
        command = [program, "--root", self.folder / "store", "--runroot", self.runroot, *words]
        env = {"HOME": str(self.folder), "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def build(self, tag: str, *options: str) -> None:
        self.call(
            "buildah", "bud", "--isolation", "chroot", "--format", "docker", "--layers", *of_pip(), *options,
            "--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", f"TORCH=torch=={version('torch')}", "--build-arg", "REVISION=abc",
            "-f", ROOT / "docker" / "Dockerfile", "-t", tag, ROOT, seconds=1200,
        )  # fmt: skip

    def run(self, *words: str, options: tuple[str, ...] = (), program: str = "", image: str = IMAGE) -> str:
        """`docker run OPTIONS IMAGE WORDS`; `program` in place of the image's own."""
        if program:
            options += ("--entrypoint", program)
        common = ("run", "--rm", "--network", "host", "--no-healthcheck")
        return self.call("podman", "--runtime", "runc", *common, *options, image, *words, seconds=120)

    def shell(self, script: str, image: str = IMAGE) -> str:
        return self.run("-c", script, program="sh", image=image).strip()


def of_pip() -> Iterator[str]:
    """The build looks where pip looks on this machine, and trusts what it trusts: its settings, and the folders they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = ast.literal_eval(value)
    if certificates := settings.get("cert"):  # not at their own path, which belongs to a package that the build installs
        yield from ("-v", f"{certificates}:/run/host-ca.crt:ro", "--build-arg", "PIP_CERT=/run/host-ca.crt")
    for name in ("index-url", "extra-index-url", "find-links"):
        yield from ("--build-arg", f"PIP_{name.upper().replace('-', '_')}={settings.get(name, '')}")
        for word in settings.get(name, "").split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                shown = path.parent if word.startswith("file://") else path  # an index lies beside the files that it names
                yield from ("-v", f"{shown}:{shown}:ro")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder = tmp_path_factory.mktemp("images")
    (folder / "containers.conf").write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n')
    found = Images(folder, tempfile.mkdtemp(dir="/tmp"))  # podman wants this one in 50 characters
    suite = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    assert suite, "the tests of the image need Debian"
    subprocess.run(["debootstrap", "--variant=minbase", suite[1], folder / "base"], check=True, capture_output=True)
    subprocess.run(["tar", "-C", folder / "base", "-cf", folder / "base.tar", "."], check=True)
    found.call("podman", "import", "-q", folder / "base.tar", BASE)
    try:
        found.build(IMAGE)
        yield found
    finally:
        found.call("podman", "rmi", "--all", "--force")
        subprocess.run(["rm", "-rf", folder, found.runroot], check=True)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder that the user of the image may write."""
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def outside(folder: Path, *words: str) -> list[float]:
    """The losses of `dist-train WORDS…` on this machine."""
    command = [*DIST_TRAIN, *words, f"run.dir={folder / 'outside'}", f"data.cache_dir={folder / 'tokens'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=folder)
    return losses(folder / "outside")


def test_two_ranks_in_the_image_train_as_outside(images: Images, runs: Path, tmp_path: Path) -> None:
    train = ["train", *TOY, "mesh.dp=2", "train.steps=5"]
    images.run(*train, "run.dir=/runs/inside", options=("-v", f"{runs}:/runs"))
    assert losses(runs / "inside") == pytest.approx(outside(tmp_path, *train), rel=1e-6) and len(losses(runs / "inside")) == 5
    assert (runs / "inside" / "config.yaml").stat().st_uid == 10001


def test_the_two_nodes_of_compose_train_one_run(images: Images, runs: Path, tmp_path: Path) -> None:
    """Both services as the file has them, but on the network of this machine: its names need a daemon."""
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert list(services) == ["node-0", "node-1"]
    short, port = [*TOY, "train.steps=5"], free_port()

    def up(service: dict[str, Any]) -> str:
        assert service["volumes"] == ["runs:/runs"]
        place = {**service["environment"], "DIST_TRAIN_RENDEZVOUS": f"node-0:{port}"}
        options = ["--add-host", "node-0:127.0.0.1", "-v", f"{runs}:/runs", "--shm-size", service["shm_size"]]
        options += [word for name in service["cap_drop"] for word in ("--cap-drop", name)]
        options += [word for rule in service["security_opt"] for word in ("--security-opt", rule.removesuffix(":true"))]
        options += [word for name, value in place.items() for word in ("-e", f"{name}={value}")]
        return images.run(*(word.replace("${DEVICE:-cpu}", "cpu") for word in service["command"]), *short, options=tuple(options))

    with ThreadPoolExecutor() as pool:
        list(pool.map(up, services.values()))
    assert losses(runs / "compose") == pytest.approx(outside(tmp_path, "train", *short), rel=1e-5)


def test_F31_arguments_reach_the_ranks_in_a_container_byte_for_byte(images: Images, runs: Path) -> None:
    (runs / "show.py").write_text(SHOW)
    images.run("launch", "--ranks", "2", "show.py", *ARGUMENTS, options=("-v", f"{runs}:/runs"))
    assert [ast.literal_eval((runs / str(rank)).read_text()) for rank in range(2)] == [ARGUMENTS, ARGUMENTS]


def test_the_image_says_what_it_is_and_holds_no_compiler(images: Images) -> None:
    (found,) = json.loads(images.call("podman", "inspect", IMAGE))
    labels = {name.rpartition(".")[2]: value for name, value in found["Config"]["Labels"].items() if "opencontainers" in name}
    assert (labels["title"], labels["version"], labels["revision"]) == ("dist_train", __version__, "abc")
    assert found["Config"]["User"] == "10001:10001"
    assert images.shell("command -v gcc g++ cc nvcc make || echo none") == "none"
    assert images.run("--version").strip() == f"dist-train {__version__}"


def test_the_health_check_passes_and_fails_with_the_reason_where_the_kernels_do_not_load(images: Images) -> None:
    (found,) = json.loads(images.call("podman", "inspect", IMAGE))
    kind, program, *rest = found["Healthcheck"]["Test"]
    assert kind == "CMD"
    images.run(*rest, program=program)
    library = images.shell(f"ls {LIBRARY}")
    with pytest.raises(AssertionError, match="does not load"):
        images.run(*rest, program=program, options=("-v", f"/dev/null:{library}:ro"))


def test_kernels_built_again_have_the_same_bytes_and_the_installed_set_is_the_pinned_one(images: Images) -> None:
    images.build("localhost/dist_train:kernels", "--target", "kernels")  # from the cache: the objects still lie there
    remove = "cd /src && rm build/csrc/reduce* build/csrc/bindings* build/lib*/dist_train/_csrc.so"
    again = f"{remove} && python setup.py build_ext >&2 && cat build/lib*/dist_train/_csrc.so | sha256sum"
    built = images.shell(again, "localhost/dist_train:kernels")
    assert images.shell(f"cat {LIBRARY} | sha256sum") == built
    pinned = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    versions = {canonical(name): number for name, number in pinned}
    installed = json.loads(images.run("list", "--format", "json", program="pip"))
    free = {each["name"] for each in installed if versions.get(canonical(each["name"])) != each["version"].partition("+")[0]}
    assert free == {"dist_train", "pip"}, "dist_train is the commit's, and pip the base's"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
