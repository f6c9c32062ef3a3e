"""``python -m roundpipe_go vectorization``: the record is of the installed binary, agrees with the sources, and shows faults."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from roundpipe_go import __main__, _native, _torch_arithmetic, _vectorization

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = Path(_native.__file__)

pytestmark = pytest.mark.skipif(sysconfig.get_platform() != "linux-x86_64", reason="the kernels are for x86-64")


def load(path: Path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


disassemble = load(ROOT / "scripts" / "disassemble.py")

LOOP = """
0000000000001000 <roundpipe-go/kernel.adamAVX2_float32_none_fma_ieee.abi0>:
    1000:\tvldmxcsr 0x1c(%rdi)
    1004:\tvbroadcastss 0x4(%rdi),%ymm0
    1008:\tcmp    %r8,%rdi
    100c:\tjg     1040 <roundpipe-go/kernel.adamAVX2_float32_none_fma_ieee.abi0+0x40>
    1010:\tvmovups (%rcx,%rdi,4),%ymm1
    1014:\tvfmadd231ps %ymm0,%ymm1,%ymm2
    1018:\tvsqrtps %ymm2,%ymm3        # a comment
    101c:\tvmovups %ymm3,(%rcx,%rdi,4)
    1020:\tadd    $0x8,%rdi
    1024:\tjmp    1008 <roundpipe-go/kernel.adamAVX2_float32_none_fma_ieee.abi0+0x8>
    1040:\tvmaskmovps (%rcx,%rdi,4),%ymm9,%ymm1
    1044:\tvsqrtps %ymm1,%ymm3
    1048:\tvmaskmovps %ymm3,%ymm9,(%rcx,%rdi,4)
    104c:\tret
"""


def described(text: str) -> dict:
    """What disassemble.py finds in the one kernel of a listing."""
    ((name, code),) = disassemble.functions(text)
    assert name == "adamAVX2_float32_none_fma_ieee"
    return disassemble.describe(code)


def faults(text: str) -> list[str]:
    return _vectorization.faults("adamAVX2_float32_none_fma_ieee", described(text))


# ---- the record


def test_record_is_of_the_installed_binary():
    compiler = shlex.split(sysconfig.get_config_var("CC") or "gcc")
    asked = subprocess.run([*compiler, "-print-prog-name=objdump"], capture_output=True, text=True, check=True)
    again = disassemble.record(asked.stdout.strip(), EXTENSION)
    recorded = _vectorization.read_record(EXTENSION)
    assert recorded["sha256"] == again["sha256"]
    assert recorded["kernels"] == again["kernels"]


@pytest.mark.skipif(shutil.which("llvm-objdump") is None, reason="there is no llvm-objdump to disassemble a second time")
def test_another_disassembler_agrees():
    assert disassemble.record("llvm-objdump", EXTENSION)["kernels"] == _vectorization.read_record(EXTENSION)["kernels"]


def source_loops() -> dict[str, list[str]]:
    """The mnemonics between the labels body and tail of each function in the generated sources."""
    loops = {}
    for file in (ROOT / "kernel").glob("adam_avx*_amd64.s"):
        for function in re.split(r"^TEXT ·", file.read_text(), flags=re.MULTILINE)[1:]:
            loop = re.search(r"^body:\n(.*?)^tail:\n", function, re.DOTALL | re.MULTILINE)
            loops[re.match(r"\w+", function)[0]] = re.findall(r"^\t([A-Z]\w+)", loop[1], re.MULTILINE)
    return loops


def test_record_counts_what_the_sources_say():
    arithmetic = re.compile(r"V(ADD|SUB|MUL|DIV|SQRT|RSQRT|RSQRT14|MAX|MIN|CMP|FN?M(ADD|SUB)\d+)P[SD]")
    # The estimates alone are there for Go's tests, and not in the binary.
    sources = {name: loop for name, loop in source_loops().items() if "_estimate" not in name}
    recorded = _vectorization.read_record(EXTENSION)["kernels"]
    assert sorted(recorded) == sorted(sources)
    for name, loop in sources.items():
        want = {
            "packed": sum(bool(arithmetic.fullmatch(mnemonic)) for mnemonic in loop),
            "fma": sum(mnemonic.startswith(("VFMADD", "VFNMADD")) for mnemonic in loop),
        }
        assert {column: recorded[name][column] for column in want} == want, name


def test_no_kernel_has_a_fault():
    kernels = _vectorization.read_record(EXTENSION)["kernels"]
    assert {name: found for name, kernel in kernels.items() if (found := _vectorization.faults(name, kernel))} == {}


def test_fma_is_where_the_name_says():
    for name, kernel in _vectorization.read_record(EXTENSION)["kernels"].items():
        if "_plain_" in name and not name.endswith("_newton"):  # whose square root is fused whatever the sums are
            assert kernel["fma"] == 0, name
        if "_fma_" in name:
            assert kernel["fma"] > 0, name


# ---- what it would catch


def test_a_packed_loop_has_no_fault():
    want = {"width": 256, "elements": 8, "packed": 2, "fma": 1, "scalar": 0, "gathers": 0, "calls": 0, "tail": "masked"}
    assert described(LOOP) == want
    assert faults(LOOP) == []


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("vsqrtps %ymm2,%ymm3 ", "vsqrtss %xmm2,%xmm2,%xmm3 "), ["1 scalar"]),
        (("vmovups (%rcx,%rdi,4),%ymm1", "vmovss (%rcx,%rdi,4),%xmm1"), ["1 scalar"]),
        (("vmovups (%rcx,%rdi,4),%ymm1", "flds (%rcx,%rdi,4)"), ["1 scalar"]),
        (("vmovups (%rcx,%rdi,4),%ymm1", "vgatherdps %ymm4,(%rcx,%ymm5,4),%ymm1"), ["1 gathers"]),
        (("vmovups (%rcx,%rdi,4),%ymm1", "call 5000 <sqrt>"), ["1 calls"]),
        (("vsqrtps %ymm2,%ymm3 ", "vsqrtps %xmm2,%xmm3 "), ["8 elements a turn in registers of 128 bits"]),
        (("add    $0x8,%rdi", "add    $0x1,%rdi"), ["1 elements a turn in registers of 256 bits"]),
        (("vsqrtps %ymm1,%ymm3\n", "sqrtss %xmm1,%xmm3\n"), ["tail scalar"]),
        (("vmaskmovps", "vmovups"), ["tail none"]),
        (("jmp    1008", "jmp    1040"), ["no packed arithmetic", "tail none"]),
    ],
    ids=lambda value: None if isinstance(value, list) else value[1].strip(),
)
def test_faults_are_found(edit, says):
    assert edit[0] in LOOP
    assert faults(LOOP.replace(*edit)) == says


def test_a_scalar_loop_is_found():
    """What a compiler makes of the formula without vectors."""
    scalar = LOOP.replace("ps ", "ss ").replace("%ymm", "%xmm").replace("vmovups", "vmovss").replace("$0x8", "$0x1")
    assert faults(scalar) == ["4 scalar", "no packed arithmetic", "tail scalar"]


@pytest.fixture
def copy(tmp_path) -> Path:
    """The extension and its record, elsewhere."""
    extension = tmp_path / EXTENSION.name
    shutil.copy(EXTENSION, extension)
    shutil.copy(EXTENSION.with_suffix(".json"), extension.with_suffix(".json"))
    assert _vectorization.read_record(extension)["kernels"]
    return extension


def test_a_stale_record_is_refused(copy):
    with copy.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(RuntimeError, match=r"\.json is of another binary: it describes sha256 .* build again"):
        _vectorization.read_record(copy)


def test_a_missing_record_is_refused(copy):
    copy.with_suffix(".json").unlink()
    with pytest.raises(RuntimeError, match=r"there is no _native.*\.json beside the extension, .* install objdump"):
        _vectorization.read_record(copy)


@pytest.mark.parametrize("objdump", ["no-such-objdump", "false"])
def test_build_goes_on_without_a_record(copy, monkeypatch, capsys, objdump):
    setup_py = load(ROOT / "setup.py")
    monkeypatch.setattr(setup_py, "find_compiler", lambda: f"printf {objdump}")  # what it answers
    setup_py.record_vectorization(copy)
    assert "no record of the kernels' instructions" in capsys.readouterr().out
    assert not copy.with_suffix(".json").exists()


# ---- the command


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["roundpipe_go", "vectorization", *arguments])
    status = __main__.main()
    return status, *capsys.readouterr()


def test_command_answers(monkeypatch, capsys, backend):
    status, text, _ = command(monkeypatch, capsys)
    json_status, as_json, _ = command(monkeypatch, capsys, "--json")
    facts = json.loads(as_json)
    here = [kernel for kernel in facts["kernels"].values() if kernel["here"]]
    assert status == json_status == int(not facts["vectorized"])
    if backend == "generic":
        assert status == 1
        assert text.startswith("no: this machine runs the backend generic, portable Go, one element at a time")
        assert here == []
    else:
        assert status == 0
        assert text.startswith("yes: this machine updates every element by packed instructions")
        assert {kernel["width"] for kernel in here} == {512 if backend == "avx512" else 256}


def test_command_lists_all_kernels(monkeypatch, capsys):
    _, text, _ = command(monkeypatch, capsys, "--all")
    assert [name for name in _vectorization.read_record(EXTENSION)["kernels"] if f"\n{name} " not in text] == []


def test_command_says_no_where_torch_computes(monkeypatch, capsys):
    none = _torch_arithmetic.TorchArithmetic("fma", None, "")
    monkeypatch.setattr(_vectorization, "torch_arithmetic", lambda dtype: none)
    monkeypatch.setattr(_vectorization._settings, "get_backend", lambda: "avx2")
    status, text, _ = command(monkeypatch, capsys)
    assert status == 1
    assert text.startswith("no: no kernel gives this torch's bits here")


def test_command_names_the_kernel_at_fault(monkeypatch, capsys):
    record = {"sha256": "0" * 64, "disassembler": "", "kernels": {"adamAVX2_float32_none_fma_ieee": described(LOOP)}}
    record["kernels"]["adamAVX2_float32_none_fma_ieee"]["scalar"] = 3
    monkeypatch.setattr(_vectorization, "read_record", lambda extension: record)
    chosen = _torch_arithmetic.TorchArithmetic("fma", "ieee", "")
    monkeypatch.setattr(_vectorization, "torch_arithmetic", lambda dtype: chosen)
    monkeypatch.setattr(_vectorization._settings, "get_backend", lambda: "avx2")
    status, text, _ = command(monkeypatch, capsys)
    assert status == 1
    assert text.startswith("no: adamAVX2_float32_none_fma_ieee: 3 scalar\n")


def test_command_says_what_is_wrong_with_the_record(monkeypatch, capsys, copy):
    copy.with_suffix(".json").unlink()
    info = {"extension": str(copy)}
    monkeypatch.setattr(_vectorization._binding, "build_info", lambda: info)
    status, text, error = command(monkeypatch, capsys)
    assert (status, text) == (1, "")
    assert "beside the extension" in error
