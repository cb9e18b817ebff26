"""The real Dockerfile, built for both targets, and the CPU image running as strangers would run it.

SGLang's GPU image cannot be had here. In its place stand images with the same SGLang, without CUDA: as a wheel, and in
upstream's layout, a checkout below a workspace folder that Python finds by a path file.
"""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from container_tools import REPOSITORY, VERSION, Containers
from server_ext.image.series import Series, pinned_version, series_hash

LAYER_BYTES = 30 * 10**6
RUN = ["run", "--detach", "--network", "none", "--read-only", "--cap-drop", "ALL"]
KEY = "sk-image-5f0c7a"
CHAT = """
import json, os, sys, urllib.request
url, path, tokens = "http://127.0.0.1:30000", sys.argv[1], int(sys.argv[2])
headers = {"Authorization": "Bearer " + sys.argv[3], "Content-Type": "application/json"}
messages = [{"role": "user", "content": "Tell me about the river."}]
body = {"model": "qwen3", "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": tokens > 1000}
data = json.dumps(body).encode() if path.startswith("/v1") else None
with urllib.request.urlopen(urllib.request.Request(url + path, data, headers)) as answer:
    for line in answer:
        print(line.decode(), end="", flush=True)
"""


def build(containers: Containers, device: str, tag: str, **arguments: str) -> subprocess.CompletedProcess[str]:
    """Build the image for a device, with arguments of the Dockerfile."""
    pairs = {"DEVICE": device, **arguments}
    return containers.build("image", tag, *(f"--build-arg={name}={value}" for name, value in pairs.items()))


def stand_in(containers: Containers, folder: Path, tag: str, *lines: str) -> str:
    """Make an image on the engine's dependencies with more lines of a Dockerfile."""
    assert containers.build("dependencies", "sglang-dependencies").returncode == 0
    text = ["FROM localhost/sglang-dependencies AS made", "ENV PATH=/opt/sglang-dflash/bin:$PATH", *lines]
    (folder / "Dockerfile").write_text("\n".join(text) + "\n")
    result = containers.build("made", tag, context=folder)
    assert result.returncode == 0, result.stderr
    return f"localhost/{tag}"


SITE = "/opt/sglang-dflash/lib/python3.11/site-packages"
CHECKOUT = (
    f"RUN mkdir -p /sgl-workspace/sglang/python && mv {SITE}/sglang /sgl-workspace/sglang/python/ "
    f"&& rm {SITE}/sglang-*/RECORD && echo /sgl-workspace/sglang/python > {SITE}/sglang.pth"
)


def added_bytes(containers: Containers, image: str, base: str) -> int:
    def layers(name: str) -> int:
        history = json.loads(containers.podman("image", "inspect", name))[0]
        return int(history["Size"])

    return layers(image) - layers(base)


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([program, REPOSITORY / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("layout", ["wheel", "checkout"])
def test_the_gpu_target_takes_each_layout(containers: Containers, tmp_path: Path, layout: str) -> None:
    """``make image`` with either tool; what both build with both is the same Dockerfile."""
    lines, tool = ([CHECKOUT], "buildah") if layout == "checkout" else (["RUN true"], "podman")
    base = stand_in(containers, tmp_path, f"stand-in-{layout}", *lines)
    digest = json.loads(containers.podman("image", "inspect", base))[0]["Digest"]
    result = containers.make("image", f"CONTAINER_TOOL={tool}", f"BASE_IMAGE={base}@{digest}", f"IMAGE=gpu-{layout}")
    root = "/sgl-workspace/sglang/python" if layout == "checkout" else SITE
    said = next(line for line in result.stdout.splitlines() if line.startswith("series "))
    assert f"{series_hash()}, 5 patches for SGLang {pinned_version()} in {root}; hooks fit in" in said
    image = f"localhost/gpu-{layout}:{VERSION}"
    assert 0 < added_bytes(containers, image, base) <= LAYER_BYTES
    labels = json.loads(containers.podman("image", "inspect", image))[0]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"] == digest


VERSION_FILE = "/sgl-workspace/sglang/python/sglang/_version.py"
REFUSED = {
    "another version": (
        [CHECKOUT, f"RUN sed -i 's/0\\.5\\.23/0.5.22/g' {VERSION_FILE}"],
        "the base image has SGLang 0.5.22 in /sgl-workspace/sglang/python, and the patches are for 0.5.23; build on an",
    ),
    "a changed file": (
        [f"RUN echo '# changed' >> {SITE}/sglang/launch_server.py"],
        f"{SITE}/sglang/launch_server.py is not the file of the SGLang 0.5.23 wheel: expected sha256",
    ),
    "a changed file in a checkout": (
        [CHECKOUT, "RUN echo '# changed' >> /sgl-workspace/sglang/python/sglang/launch_server.py"],
        "/sgl-workspace/sglang/python/sglang/launch_server.py is not the file of the SGLang 0.5.23 wheel: expected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_sglang_is_refused(containers: Containers, tmp_path: Path, case: str) -> None:
    lines, message = REFUSED[case]
    base = stand_in(containers, tmp_path, f"refused-{case.replace(' ', '-')}", *lines)
    result = build(containers, "gpu", "refused", BASE_IMAGE=base)
    assert result.returncode != 0
    assert f"bake: error: {message}" in result.stdout + result.stderr


PATCH = Series.load(pinned_version()).patches[0].name
# What is changed where in a copy of the sources, and how the build ends.
FAULTS = {
    "a patch that does not fit": (
        f"image/patches/{pinned_version()}/{PATCH}",
        r"^     \w",  # an unchanged line of a file
        f"bake: error: {PATCH} does not fit SGLang {pinned_version()}: ",
    ),
    "a hook that does not take": (
        "server_ext/openai_api.py",
        r"TokenizerManager\._",
        "bake: error: the self-test of the HTTP process failed: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_ours_ends_the_build(containers: Containers, cpu: str, tmp_path: Path, fault: str) -> None:
    changed, pattern, message = FAULTS[fault]
    for name in containers.run("git", "-C", str(REPOSITORY), "ls-files").stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, tmp_path / name)
    text, count = re.subn(pattern, r"\g<0>changed", (tmp_path / changed).read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / changed).write_text(text)
    result = containers.build("image", "refused", "--build-arg=DEVICE=cpu", context=tmp_path)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr


def test_another_series_than_the_label_names_is_refused(containers: Containers, cpu: str) -> None:
    result = build(containers, "cpu", "refused", SERIES_HASH="0123")
    assert result.returncode != 0
    assert "bake: error: the image would be labelled with series 0123 and holds " in result.stdout + result.stderr


def test_what_the_cpu_image_holds(containers: Containers, cpu: str) -> None:
    assert containers.build("dependencies", "sglang-dependencies").returncode == 0
    assert 0 < added_bytes(containers, cpu, "localhost/sglang-dependencies") <= LAYER_BYTES
    image = json.loads(containers.podman("image", "inspect", cpu))[0]
    assert image["Labels"]["sglang-dflash.series.sha256"] == series_hash()
    config = image["Config"]
    assert (config["User"], config["Entrypoint"]) == ("1000:0", ["sglang-dflash", "serve"])

    chart = (REPOSITORY / "charts/sglang-dflash/templates/_pod.tpl").read_text()
    block = chart.split('{{- define "sglang-dflash.environment" -}}')[1].split("{{- if")[0]
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    assert yaml.safe_load(block).items() <= environment.items()


@pytest.mark.parametrize("tool", ["buildah", "podman"])
def test_the_sbom_has_sglang_with_its_patches(containers: Containers, cpu: str, tool: str) -> None:
    sbom = json.loads(containers.make("sbom", "DEVICE=cpu", f"CONTAINER_TOOL={tool}").stdout)
    (sglang,) = (package for package in sbom["packages"] if package["name"] == "sglang")
    assert (sbom["spdxVersion"], sglang["versionInfo"]) == ("SPDX-2.3", pinned_version())
    names = {file["SPDXID"]: Path(file["fileName"]).name for file in sbom["files"]}
    applied = [r for r in sbom["relationships"] if r["relationshipType"] == "PATCH_APPLIED"]
    assert {r["spdxElementId"] for r in applied} == {sglang["SPDXID"]}
    expected = [patch.name for patch in Series.load(pinned_version()).patches]
    assert sorted(names[r["relatedSpdxElement"]] for r in applied) == sorted(expected)


@pytest.fixture(scope="module")
def cache(containers: Containers) -> Iterator[str]:
    """A volume that is new at first; later containers find the model pair there."""
    name = containers.podman("volume", "create").strip()
    yield name
    containers.podman("volume", "rm", "--force", name)


@pytest.fixture
def running(containers: Containers, cpu: str, cache: str, tmp_path: Path) -> Iterator[str]:
    """A container under a random user id, without any network but loopback, with a key in a file."""
    tmp_path.joinpath("key").write_text(KEY)
    tmp_path.chmod(0o755)
    uid = str(random.randrange(2000, 60000))
    command = [*RUN, "--user", uid, "--volume", f"{tmp_path}/key:/key:ro", "--volume", f"{cache}:/cache", cpu]
    container = containers.podman(*command, "--pair", "qwen3", "--api-key-file", "/key").strip().splitlines()[-1]
    yield container
    containers.podman("rm", "--force", "--volumes", container)


def wait_for(containers: Containers, container: str, text: str) -> None:
    deadline = time.monotonic() + 400
    while text not in (log := containers.podman("logs", container)):
        assert time.monotonic() < deadline, log[-3000:]
        time.sleep(1)


def status_after(containers: Containers, container: str, signum: signal.Signals) -> int:
    containers.podman("kill", "--signal", signum.name, container)
    return int(containers.podman("wait", container).strip())


def test_it_serves_and_drains(containers: Containers, running: str, tmp_path: Path) -> None:
    def ask(path: str, tokens: int) -> list[str]:
        return ["exec", running, "python3", "-c", CHAT, path, str(tokens), KEY]

    wait_for(containers, running, "Ready after")
    answer = json.loads(containers.podman(*ask("/v1/chat/completions", 8)))
    assert answer["usage"]["completion_tokens"] == 8
    figures = containers.podman(*ask("/metrics", 0))
    assert f'patch_series="{series_hash()}"' in figures
    # At ratio 1, the default, the draft has no pool of its own.
    assert re.search(r'^sglang_dflash_pool_used_slots{.*pool="full"', figures, re.MULTILINE)
    states = containers.podman("exec", running, "sh", "-c", "cat /proc/[0-9]*/stat")
    assert [line for line in states.splitlines() if ") Z " in line] == []
    environment = containers.podman("exec", running, "sh", "-c", "cat /proc/[0-9]*/environ || true")
    for place in (containers.podman("inspect", running), containers.podman("logs", running), environment):
        assert KEY not in place

    command = ["podman", *ask("/v1/chat/completions", 2000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=containers.environment) as stream:
        assert stream.stdout is not None
        assert stream.stdout.readline().startswith("data: ")
        assert status_after(containers, running, signal.SIGTERM) == 0
        rest = stream.stdout.read()
    assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")


def test_sigterm_at_start_up_ends_it_at_once(containers: Containers, running: str) -> None:
    wait_for(containers, running, "loading the engine")
    assert status_after(containers, running, signal.SIGTERM) == 143
    assert "SIGTERM during start-up: stopping at once" in containers.podman("logs", running)
