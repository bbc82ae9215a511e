"""Build the shared libraries that torch's CUDA build needs.

CUDA's runtime and NCCL are built from the sources here. All other libraries contain only the
symbols, which return "not supported".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
SOURCES = {"libcudart": "runtime.cpp", "libnccl": "collectives.cpp"}
UNSUPPORTED = 801
# Libraries of names that carry no version, by how they begin.
PREFIXES = {
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
}
# torch opens it when it needs it, and wants every name: it begins, it knows a device, no more.
NVML = "libnvidia-ml.so.1"
NVML_NAMES = (
    "nvmlInit_v2",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetGpuFabricInfoV",
)
DRIVER = "libcuda.so.1"  # of names that are cu and a capital letter
# A context exists, or torch makes none; cuDNN is of a version that torch takes.
ANSWERS = {
    "cuDevicePrimaryCtxGetState": "int f(int d, int* of, int* is) { return *of = !(*is = 1); }",
    "cudnnGetVersion": "long f() { return 92400; }",
    "cuptiGetVersion": "long f() { return 0; }",
    "nvmlInit_v2": "long f() { return 0; }",
    "nvmlDeviceGetComputeRunningProcesses": "long f(void* of, int* count) { return *count = 0; }",
    "nvmlDeviceGetHandleByPciBusId_v2": "long f() { return 0; }",
}


def make_libraries(site: Path, headers: Path) -> None:
    """Into torch's own folder in `site`, where its libraries look first."""
    place = site / "torch" / "lib"
    wanted = names_wanted(place)
    for library in sorted(wanted, key=lambda name: not name.startswith("libcudart")):
        make_library(place, library, wanted[library], headers)


def names_wanted(place: Path) -> dict[str, dict[str, str]]:
    """Return the required symbol names by library, each with its version."""
    collected: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(place.glob("lib*.so")):
        for needed in re.findall(
            r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", read("readelf", "-d", path)
        ):
            collected[needed].update({})
        for line in read("nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            library = owner(name, version)
            if library:
                collected[library][name] = version
    names = re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", (place / "libc10_cuda.so").read_bytes())
    for name in names:  # which older versions look up in the driver by themselves
        collected[DRIVER].setdefault(name.decode(), "")
    return {**collected, NVML: dict.fromkeys(NVML_NAMES, "")}


def owner(name: str, version: str) -> str | None:
    if re.match(r"lib(cu|nv)", version):
        return version
    for prefix, library in PREFIXES.items():
        if name.startswith(prefix):
            return library
    return DRIVER if re.match(r"cu[A-Z]", name) else None


def make_library(place: Path, library: str, names: dict[str, str], headers: Path) -> None:
    with TemporaryDirectory() as work:
        objects, defined = [], set[str]()
        source = next((s for key, s in SOURCES.items() if library.startswith(key)), None)
        if source is not None:
            object_file = Path(work) / "own.o"
            run(
                "g++",
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-fvisibility=hidden",
                "-I",
                headers,
                "-c",
                HERE / source,
                "-o",
                object_file,
            )
            objects.append(object_file)
            listed = read("nm", "--defined-only", object_file).splitlines()
            defined = {line.split()[-1] for line in listed}
        names_file, objects = Path(work) / "names.c", [*objects, Path(work) / "names.o"]
        stub = _driver_stub if library == DRIVER else _stub
        names_file.write_text("\n".join(stub(n) for n in sorted(names) if n not in defined) + "\n")
        run("gcc", "-w", "-fPIC", "-c", names_file, "-o", objects[-1])
        versions = defaultdict(list)
        for name, version in names.items():
            versions[version].append(name)
        if library.startswith("libcudart") and len(versions) == 1:
            versions[next(iter(versions))].append("softcuda_*")
        script = Path(work) / "versions"
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(object_file)}; }};\n"
                for version, object_file in versions.items()
                if version
            )
        )
        link = [f"-Wl,--version-script={script}"] if script.read_text() else []
        if library.startswith("libnccl") or library == DRIVER:
            link += [str(next(place.glob("libcudart.so.*"))), "-Wl,-rpath,$ORIGIN"]
        out = place / library
        run(
            "g++",
            "-shared",
            f"-Wl,-soname,{library}",
            "-Wl,--build-id=none",
            "-o",
            out,
            *objects,
            *link,
            "-lpthread",
            "-lrt",
        )


def _stub(name: str) -> str:
    answer = ANSWERS.get(name)
    if answer is None:
        return f"long {name}() {{ return {UNSUPPORTED}; }}"
    return re.sub(r"\bf\(", f"{name}(", answer, count=1)


def _driver_stub(name: str) -> str:
    """Return the source of a driver function that calls the runtime's."""
    if name in ANSWERS:
        return _stub(name)
    kind = "int (*)(long, long, long, long, long, long)"
    return (
        "void* softcuda_driver(const char*); "
        f"int {name}(long a, long b, long c, long d, long e, long f) "
        f'{{ return (({kind})softcuda_driver("{name}"))(a, b, c, d, e, f); }}'
    )


def run(*command: object, timeout_s: float | None = None) -> None:
    subprocess.run(list(map(str, command)), check=True, timeout=timeout_s)


def read(*command: object) -> str:
    return subprocess.run(
        list(map(str, command)), check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    make_libraries(Path(sys.argv[1]), Path(sys.argv[2]))
