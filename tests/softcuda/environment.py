"""Create an environment with torch's CUDA build on software CUDA.

    python -m tests.softcuda.environment PLACE [VERSION]

It borrows every other package from the environment that runs this. torch is installed without its
dependencies: they would take 4 GB and replace the libraries built here.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from site import getsitepackages

from tests.softcuda import MODULE
from tests.softcuda.libraries import make_libraries, read, run

HERE = Path(__file__).parent
NEWEST, OLDEST = "2.14.1", "2.6.0"
HEADERS = {  # of CUDA's runtime, by torch's major version of CUDA: for compiling only
    13: ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
    12: ("nvidia-cuda-runtime-cu12==12.4.127", "nvidia-cuda-nvcc-cu12==12.4.131"),
}
MARK, COMPILING = "made-of", "compiling"


def set_up(place: Path, version: str = NEWEST, *, within_s: float | None = None) -> Path:
    """Create or update the environment and return its Python.

    If `within_s` is given, downloads that take longer raise TimeoutExpired.
    """
    place = place.resolve()
    deadline = None if within_s is None else time.monotonic() + within_s
    python = place / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", "--without-pip", place)
    version_of_python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = place / "lib" / version_of_python / "site-packages"
    if not (site / f"torch-{version}.dist-info").exists():
        _install([f"torch=={version}"], site, deadline)
    cuda = int(_cuda_of(site).split(".")[0])
    headers = place / f"headers-{cuda}"
    if not headers.exists():
        _install(HEADERS[cuda], headers, deadline)
    mark = _mark(version)
    if _text(place / MARK) != mark:
        (place / COMPILING).touch()  # from here on a failure is ours
        include = _includes(headers)
        make_libraries(site, include)
        _compile(site, include)
        _borrow(site)
        (place / MARK).write_text(mark)
        (place / COMPILING).unlink()
    return python


def _install(packages: Sequence[str], into: Path, deadline: float | None) -> None:
    left_s = None if deadline is None else max(1.0, deadline - time.monotonic())
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--upgrade",
        "--target",
        into,
        *packages,
        timeout_s=left_s,
    )


def _cuda_of(site: Path) -> str:
    """Return the version of CUDA that torch was built for."""
    match = re.search(r"^cuda: .*= '([\d.]+)'", _text(site / "torch" / "version.py"), re.MULTILINE)
    if match is None:
        raise SystemExit("the torch that was installed is no CUDA build: this index has none")
    return match[1]


def _includes(headers: Path) -> Path:
    """Collect all headers in one folder; CUDA 12 has them in several."""
    together = headers / "include"
    for folder in headers.glob("nvidia/**/include"):
        shutil.copytree(folder, together, dirs_exist_ok=True)
    return together


def _compile(site: Path, headers: Path) -> None:
    torch = site / "torch"
    includes = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        headers,
        sysconfig.get_path("include"),
    ]
    symbols = [
        n for n in read("nm", "-D", torch / "lib" / "libc10.so").splitlines() if "N3c10" in n
    ]
    new_strings = any(" T " in name and "__cxx11" in name for name in symbols)
    run(
        "g++",
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(new_strings)}",
        *(f"-I{path}" for path in includes),
        HERE / "operators.cpp",
        "-o",
        site / f"{MODULE}.so",
        f"-L{torch / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_python",
        next((torch / "lib").glob("libcudart.so.*")),
        f"-Wl,-rpath,{torch / 'lib'}",
        "-Wl,--allow-shlib-undefined",
    )


def _borrow(site: Path) -> None:
    """Make the packages of the running environment importable after those of the new one.

    Its .pth files count too, because an editable LoHan finds its native core by one.
    """
    site_packages = {str(Path(path)) for path in getsitepackages()}
    lines = [
        f"import site; site.addsitedir({path!r})" if path in site_packages else path
        for path in sys.path
        if "site-packages" in path and Path(path) != site
    ]
    (site / "zz-borrowed.pth").write_text("\n".join(lines) + "\n")
    shutil.copy(HERE / "start.py", site / f"{MODULE}_start.py")
    (site / f"{MODULE}.pth").write_text(f"import {MODULE}_start\n")


def _mark(version: str) -> str:
    result = hashlib.sha256(version.encode())
    scripts = [HERE / name for name in ("environment.py", "libraries.py", "start.py")]
    for path in sorted([*HERE.glob("*.?pp"), HERE / "../backend/fallback.hpp", *scripts]):
        result.update(path.read_bytes())
    return result.hexdigest()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    print(set_up(Path(sys.argv[1]), *sys.argv[2:3]))
