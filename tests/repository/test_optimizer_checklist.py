"""The checklist of CONTRIBUTING.md for a new optimizer names all files that a dummy must change.

The dummy descends by the sign of its momentum. The native core is built in a temporary folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.package_copies import CopyServer, PackageCopy, lohan, trained, write_inputs

TOOLS = ("nanobind>=2.4", "cmake>=3.18", "ninja")


@pytest.fixture(scope="module")
def server() -> Iterator[CopyServer]:
    result = CopyServer()
    yield result
    result.close()


# -- the native code -------------------------------------------------------------------------------


NUMBERS = """struct SignumNumbers {
  float decay, momentum, lr;
};

"""
DECLARED = "SignumNumbers signum_numbers(double lr, double momentum, double weight_decay);\n"
DEFINED = """SignumNumbers signum_numbers(double lr, double momentum, double weight_decay) {
  return {rounded(1.0 - lr * weight_decay), rounded(momentum), rounded(lr)};
}

"""
RULE = """//   m = momentum * m + g
//   p = p * (1 - lr * weight_decay) - lr * sign(m)
template <class V>
struct Signum {
  using F = typename V::F;
  static constexpr int moments = 1;
  static constexpr bool has_sign[] = {true};
  F decay, momentum, lr;

  explicit Signum(const UpdateArgs& a)
      : decay(V::set(a.signum.decay)),
        momentum(V::set(a.signum.momentum)),
        lr(V::set(a.signum.lr)) {}

  F operator()(F p, F g, F (&moment)[moments]) const {
    moment[0] = V::add(V::mul(momentum, moment[0]), g);
    return V::sub(V::mul(p, decay), V::with_sign(lr, moment[0]));
  }
};

"""
UPDATE = """void signum_update(Call& call, nb::handle g, double lr, double momentum,
                   double weight_decay, double grad_scale, uint32_t seed, uint32_t first) {
  call.gradient(g);
  check_positive("lr", lr);
  check_share("momentum", momentum);
  check_positive("weight_decay", weight_decay);
  call.args.signum = signum_numbers(lr, momentum, weight_decay);
  call.numbers(grad_scale, seed, first);
  call.add_update();
}

nb::object signum(Call call, nb::handle m, nb::handle g, double lr, double momentum,
                  double weight_decay, const Rest& rest) {
  call.moment("m", m, true);
  signum_update(call, g, lr, momentum, weight_decay, rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

"""
CASE = """      case Rule::signum: {
        signum_update(call, g, lr, n.operator()<double>("momentum"), decay, scale, seed, first);
        break;
      }
"""
# The arguments of a kernel and of the function that takes the master weights, by their format.
MASTERS = {"fp32": "p", "bf16": "w, r", "fp16": "w, p"}


def bindings(several: bool) -> str:
    """Return the bindings of the kernels for one update, or for several in one pass."""
    text = ""
    for name, arrays in MASTERS.items():
        declared = ", ".join(f"H {array}" for array in arrays.split(", "))
        named = ", ".join(f'"{array}"_a' for array in (*arrays.split(", "), "m"))
        call = f"{name}(Rule::signum, {arrays})"
        if several:
            text += f'  m.def("signum_{name}_updates", []({declared}, H m, LOHAN_SEVERAL) {{\n'
            text += f"    return apply_updates({call}, {{m}}, LOHAN_SEVERAL_VALUES);\n"
            text += f"  }}, {named}, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);\n"
        else:
            numbers = "double lr, double momentum, double decay"
            text += f'  m.def("signum_{name}", []({declared}, H m, H g, {numbers}, LOHAN_REST) {{\n'
            text += f"    return signum({call}, m, g, lr, momentum, decay, LOHAN_REST_VALUES);\n"
            text += f'  }}, {named}, "g"_a, nb::kw_only(), "lr"_a, "momentum"_a, '
            text += '"weight_decay"_a, LOHAN_REST_NAMES);\n'
    return text


def signatures() -> str:
    text = ""
    for name, arrays in MASTERS.items():
        declared = ", ".join(f"{array}: Any" for array in arrays.split(", "))
        text += f"def signum_{name}({declared}, m: Any, g: Any, **numbers: Any) -> Any: ...\n"
        text += f"def signum_{name}_updates({declared}, m: Any, *rest: Any, **n: Any) -> Any: ...\n"
    return text


def edit_core(copy: PackageCopy) -> None:
    copy.after("csrc/update.hpp", r"^enum class Rule \{ ", "signum, ")
    copy.before("csrc/update.hpp", r"^struct UpdateArgs \{\n", NUMBERS)
    copy.after("csrc/update.hpp", r"^  union \{\n", "    SignumNumbers signum;\n")
    copy.before("csrc/update.hpp", r"^SgdNumbers sgd_numbers\(", DECLARED)
    copy.before("csrc/update.cpp", r"^SgdNumbers sgd_numbers\(", DEFINED)
    copy.before("csrc/rules.hpp", r"^\}  // namespace\n\}  // namespace lohan", RULE)
    switch = "    case Rule::signum: return update_by<V, Signum>(a, begin, end);\n"
    copy.after("csrc/update_kernel.hpp", r"^  switch \(a\.rule\) \{\n", switch)
    file = "csrc/bind_updates.cpp"
    copy.before(file, r"^// -- several updates in one pass", UPDATE)
    copy.after(file, r"^    switch \(call\.args\.rule\) \{\n", CASE)
    copy.after(file, r"^#define LOHAN_REST_VALUES .*\n", bindings(several=False))
    copy.before(file, r"^#undef LOHAN_SEVERAL\n", bindings(several=True))
    copy.before("lohan/_core.pyi", r"^def sgd_fp32\(", signatures())


def build_core(copy: PackageCopy, folder: Path) -> None:
    """Build the native core of a copy, with tools that are installed in a new environment."""
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
    bin_folder = folder / "tools" / "bin"
    subprocess.run([bin_folder / "pip", "install", "-q", *TOOLS], check=True)
    env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    options = ["-G", "Ninja", f"-DPython_EXECUTABLE={bin_folder / 'python'}"]
    source, build = copy.folder / "csrc", folder / "build"
    subprocess.run(["cmake", "-S", source, "-B", build, *options], check=True, env=env)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True, env=env)
    for old in (copy.folder / "lohan").glob("_core*.so"):
        old.unlink()
    (core,) = build.glob("_core*.so")
    shutil.copy2(core, copy.folder / "lohan")


# -- the Python code -------------------------------------------------------------------------------


SIGNUM = '''@dataclass(frozen=True, kw_only=True)
class Signum(Optimizer):
    """Descent by the sign of the momentum."""

    momentum: float = 0.9

    name: ClassVar[str] = "signum"
    moment_specs: ClassVar[tuple[Moment, ...]] = (Moment("m"),)

    @classmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        return cls(momentum=train.momentum, **shared)

    def numbers(self, step: int) -> dict[str, Any]:
        return {"momentum": self.momentum}


'''
PLAIN = """class PlainSignum(torch.optim.Optimizer):
    def __init__(self, groups: Any, *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                m = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                m.mul_(group["momentum"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * m.sign())


"""
BRANCH = """    if isinstance(optimizer, Signum):
        return PlainSignum(groups, lr=1.0, momentum=optimizer.momentum)
"""


def edit_package(copy: PackageCopy) -> None:
    file = "lohan/optim.py"
    copy.before(file, r"^OPTIMIZERS: ", SIGNUM)
    copy.after(file, r"^OPTIMIZERS: .* for cls in \(AdamW, SGD, Lion", ", Signum")
    copy.after("lohan/__init__.py", r"^    from lohan\.optim import ", "Signum, ")
    copy.after("lohan/__init__.py", r"^_MODULE_OF = \{\n", '    "Signum": "optim",\n')
    copy.after("lohan/__init__.py", r"^__all__ = \[\n", '    "Signum",\n')
    file = "lohan/tools/reference.py"
    copy.after(file, r"^from lohan\.optim import ", "Signum, ")
    copy.before(file, r"^class PlainLion\(", PLAIN)
    copy.before(file, r"^    if isinstance\(optimizer, SGD\):\n", BRANCH)


# -- in a process that has imported the copy -------------------------------------------------------


def reference(p: Any, m: Any, g: Any, numbers: dict[str, Any]) -> tuple[Any, Any]:
    """Return weights and momentum after one update, computed by numpy."""
    import numpy as np

    decay = np.float32(1.0 - numbers["lr"] * numbers["weight_decay"])
    g = g * np.float32(numbers.get("grad_scale", 1.0))
    m = np.float32(numbers["momentum"]) * m + g
    return p * decay - np.float32(numbers["lr"]) * np.sign(m), m


def check_kernels() -> list[str]:
    """Compare the kernels of all instruction sets with numpy, and return their names."""
    import numpy as np
    import torch

    from lohan import _core

    numbers = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
    random, count = np.random.default_rng(0), 1037
    start = random.standard_normal((3, count)).astype(np.float32)
    start[:, ::7] = 0.0
    for isa in _core.supported_isas():
        _core.set_isa(isa)
        p, m, g = (torch.from_numpy(each).clone() for each in start)
        _core.signum_fp32(p, m, g, grad_scale=0.5, **numbers)
        wanted = reference(*start, {**numbers, "grad_scale": 0.5})
        for got, expected in zip((p, m), wanted, strict=True):
            assert got.numpy().tobytes() == expected.tobytes(), isa
        halves = torch.from_numpy(start[0]).half()
        p, m = (torch.from_numpy(each).clone() for each in start[:2])
        _core.signum_fp16(halves, p, m, g, grad_scale=0.5, **numbers)
        assert p.numpy().tobytes() == wanted[0].tobytes()
        assert torch.equal(halves, p.half())
    return [name for name in dir(_core) if name.startswith("signum")]


def run_optimizer(folder: str) -> dict[str, Any]:
    """Train, while every update is compared with numpy."""
    from lohan import Signum, __all__, _core

    assert "Signum" in __all__ and Signum().kind.optimizer == "signum"
    kernels, kernel, updates = check_kernels(), _core.signum_fp32, []

    def checked(p: Any, m: Any, g: Any, **numbers: Any) -> Any:
        wanted = reference(*(each.numpy().copy() for each in (p, m, g)), numbers)
        result = kernel(p, m, g, **numbers)
        for got, expected in zip((p, m), wanted, strict=True):
            assert got.numpy().tobytes() == expected.tobytes()
        updates.append(len(p))
        return result

    _core.signum_fp32 = checked
    words = "--optimizer signum --weight-decay 0.1 --steps 4 --lr 1e-4 --schedule constant"
    runs = {"serial": f"{words} --no-overlap", "overlapped": words}
    runs["logged"] = f"{words} --log-gradients 2"
    runs["int8"] = f"{words} --moments int8 --dtype bf16"
    results = trained(folder, runs)
    out = Path(folder, "resumed")
    lohan("train", *write_inputs(Path(folder)), "--out", out, *words.split(), "--steps", 2)
    lohan("resume", out, "--steps", 4)
    weights = (out / "model" / "model.safetensors").read_bytes()
    lohan("verify", "--config", Path(folder, "overlapped", "run.toml"), "--steps", 3)
    return {
        "results": results,
        "resumed": hashlib.sha256(weights).hexdigest(),
        "kernels": kernels,
        "updates": len(updates),
    }


@pytest.mark.slow
def test_optimizer_trains_with_the_bits_of_numpy_and_verifies(server, tmp_path):
    """Download the tools that build the native core, and build it with the dummy."""
    copy = PackageCopy(tmp_path / "copy", "A new optimizer")
    edit_core(copy)
    edit_package(copy)
    others = ("lohan/config.py", "lohan/hf/arguments.py", "lohan/hf/optimizers.py")
    copy.check_complete(kept=others)
    build_core(copy, tmp_path)
    shown = server.call(copy, f"{__name__}:run_optimizer", folder=tmp_path / "runs")
    results = shown["results"]
    assert results["overlapped"] == results["logged"] == results["serial"] != results["int8"]
    assert shown["resumed"] == results["serial"][1]
    assert shown["updates"] > 8
    typed = re.findall(r"^def (signum\w*)\(", (copy.folder / "lohan/_core.pyi").read_text(), re.M)
    assert sorted(typed) == sorted(shown["kernels"]) and len(typed) == 6
