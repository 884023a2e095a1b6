"""`powertrain diagnose`: every literal text gets its cause; what is unknown is said to be."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.doctor.causes import CAUSES
from powertrain.doctor.causes.covers import COVERS
from powertrain.doctor.diagnose import attention_call, diagnose, first_error
from tests.doctor.library_messages import LIBRARY_MESSAGES
from tests.doctor.messages import MESSAGES as MORE_MESSAGES
from tests.doctor.texts import MESSAGES, TE_LOG, TEXTS

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text().splitlines()]
FRESH = [json.loads(line) for line in (Path(__file__).parent / "fresh_cases.jsonl").read_text().splitlines()]
NOISE = "INFO step 17 loss 2.31\nDownloading torch-2.9.0.whl (899 MB)\n"


ALL_TEXTS = TEXTS + MESSAGES + MORE_MESSAGES + LIBRARY_MESSAGES


@pytest.mark.parametrize("name, text", ALL_TEXTS, ids=[f"{index}-{name}" for index, (name, _) in enumerate(ALL_TEXTS)])
def test_literal_texts(name: str, text: str) -> None:
    first = diagnose(NOISE + text)[0]
    assert first.cause.name == name
    assert first.evidence and first.evidence in re.sub(r" +", " ", text) + text
    for language in ("en", "zh"):
        assert first.message(language) and first.fix(language)
    if "{" in first.cause.cause and all(f"?P<{key}>" in first.cause.pattern for key in first.groups):
        assert not re.search(
            r"\{(?!" + "|".join(set(_groups(first.cause.pattern)) - set(first.groups)) + r")\w+\}", first.message()
        )


def _groups(pattern: str) -> list[str]:
    return re.findall(r"\?P<(\w+)>", pattern) or ["-"]


def test_there_are_forty_and_every_cause_has_one() -> None:
    assert len(TEXTS) >= 40
    shown = {name for name, _ in ALL_TEXTS} | {case["cause"] for case in CASES + FRESH} - {"unknown"}
    assert {cause.name for cause in CAUSES} == shown


def test_causes_that_cover_others_exist_and_no_two_cover_each_other() -> None:
    names = {cause.name for cause in CAUSES}
    assert {*COVERS, *set().union(*COVERS.values())} <= names
    assert not [(name, other) for name, others in COVERS.items() for other in others if name in COVERS.get(other, ())]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_cases_from_the_wild(case: dict[str, str]) -> None:
    """Texts of public threads: `set` says whether a pattern was written with the text in sight (docs/doctor.md)."""
    found = diagnose(case["text"])
    if case["cause"] == "unknown":
        assert all(one.cause.confidence == "possible" or one.cause.fallback for one in found), [
            one.cause.name for one in found
        ]
        first = first_error(case["text"])
        assert first and case["first_error"] in first[1]
        return
    assert found and found[0].cause.name == case["cause"], [one.cause.name for one in found]
    for one in found:
        assert not re.search(r"\{\w+\}", one.message() + one.message("zh")), one.message()


def test_cases_are_of_threads_and_differ() -> None:
    assert len({case["id"] for case in CASES}) == len(CASES) >= 120
    assert all(case["url"].startswith("https://github.com/") and len(case["text"]) < 2000 for case in CASES)


def test_a_case_among_other_output_is_found_as_well() -> None:
    for case in CASES:
        alone = [one.cause.name for one in diagnose(case["text"])]
        assert [one.cause.name for one in diagnose(NOISE * 3 + case["text"] + "\n" + NOISE)] == alone, case["id"]


def test_a_symptom_is_left_out_where_a_cause_explains_it() -> None:
    symptom = "RuntimeError: CUDA error: unspecified launch failure\n"
    (only,) = diagnose(symptom)
    assert only.cause.confidence == "possible"
    both = diagnose(symptom + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    assert [one.cause.name for one in both] == ["gpu-memory-defect"]


@pytest.mark.parametrize(
    "total, free, name", [("44.99", "37.32", "oom-but-free"), ("44.99", "0.11", "cuda-out-of-memory")]
)
def test_memory_that_is_free_is_not_full(total: str, free: str, name: str) -> None:
    text = f"CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; {total} GiB total capacity; 6.15 GiB already "
    (one,) = diagnose(text + f"allocated; {free} GiB free; 6.15 GiB reserved in total by PyTorch)")
    assert one.cause.name == name


def test_causes_are_well_formed() -> None:
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    for cause in CAUSES:
        assert cause.source.startswith("https://")
        assert cause.confidence in ("certain", "likely", "possible")
        assert re.search(r"[\u4e00-\u9fff]", cause.cause_zh) and not re.search(r"[\u4e00-\u9fff]", cause.cause)
        used = set(re.findall(r"\{(\w+)\}", cause.cause + cause.fix + cause.cause_zh + cause.fix_zh))
        assert used <= {*_groups(cause.pattern), *cause.derives}, cause.name


@pytest.mark.parametrize(
    "text",
    [
        "",
        NOISE,
        "Building wheel for flash-attn (setup.py) ... done\nSuccessfully installed flash-attn-2.8.3\n",
        "Building extension module fused...\n" + NOISE * 4,
        "INFO importing torchvision: No module named 'torchvision'\n",
        "Building extension module fused...\nValueError: bad\n",
    ],
)
def test_texts_without_a_known_cause(text: str) -> None:
    assert diagnose(text) == []


def test_a_cause_comes_before_its_consequences() -> None:
    text = dict(TEXTS)["compiler-killed"] + "RuntimeError: Error building extension 'fused_adam'\n"
    assert [one.cause.name for one in diagnose(text)] == ["compiler-killed"]
    both = (
        dict(TEXTS)["compiler-killed"]
        + "\nImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    )
    assert [one.cause.name for one in diagnose(both)] == ["compiler-killed", "undefined-symbol"]


def test_lines_and_colors() -> None:
    (one,) = diagnose("first\n\x1b[31mnvcc fatal   : Unsupported gpu architecture 'compute_120'\x1b[0m\nlast\n")
    assert (one.line, one.evidence) == (2, "nvcc fatal   : Unsupported gpu architecture 'compute_120'")
    assert "does not know compute_120" in one.message() and "不认识 compute_120" in one.message("zh")


@pytest.mark.parametrize("text", [
    "\x1b[31m\x1b[1mnvcc fatal\x1b[0m\x1b(B\x1b[m   : Unsupported gpu architecture 'compute_120'",
    "\x1b[?25l\x1b[38:5:1mnvcc fatal   : Unsupported\x1b[0K gpu architecture 'compute_120'",
    "\x1b]8;;file:///a/b.cu\x1b\\nvcc fatal\x1b]8;;\x07   : Unsupported gpu architecture 'compute_120'",
])  # fmt: skip
def test_control_sequences_of_a_terminal(text: str) -> None:
    (one,) = diagnose(text)
    assert one.evidence == "nvcc fatal   : Unsupported gpu architecture 'compute_120'"


@pytest.mark.parametrize(("text", "name"), [
    ("/tmp/x.cpp:1:10: 致命错误：cudnn.h：没有那个文件或目录", "cudnn-headers"),
    ("/tmp/x.cpp:1:10: schwerwiegender Fehler: Python.h: Datei oder Verzeichnis nicht gefunden", "python-headers"),
    ("/tmp/x.cpp:1:10: erreur fatale : Python.h : Aucun fichier ou dossier de ce type", "python-headers"),
    ("/usr/bin/ld: 找不到 -lcuda: 没有那个文件或目录", "libcuda-link"),
    ("/usr/bin/ld: -lcuda kann nicht gefunden werden: Datei oder Verzeichnis nicht gefunden", "libcuda-link"),
    ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar", "disk-full"),
    ("x: libcudart.so.11.0: 无法打开共享对象文件: 没有那个文件或目录", "library-of-another-cuda"),
    ("/tmp/x.cpp:1:10: erro fatal: Python.h: Arquivo ou diretório inexistente", "python-headers"),
    ("bash: nvcc: Kommando nicht gefunden.", "cuda-home"),
    ("bash: nvcc : commande introuvable", "cuda-home"),
    ("bash: nvcc：未找到命令", "cuda-home"),
    ("x.o: 在函数‘main’中：对‘nvtxRangePop’未定义的引用", "undefined-reference"),
])  # fmt: skip
def test_messages_of_compilers_in_other_languages(text: str, name: str) -> None:
    assert [one.cause.name for one in diagnose(text)] == [name]


NCCL_PLUGIN = ("node1:123:456 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared "
               "object file: No such file or directory : when loading libnccl-net.so\n")  # fmt: skip


def test_a_plugin_that_nccl_does_without_is_no_cause() -> None:
    """Every healthy log with NCCL_DEBUG=INFO has the line; it was said first, and "certain"."""
    assert diagnose(NCCL_PLUGIN) == []
    late = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE, Timeout(ms)=6)"
    assert [one.cause.name for one in diagnose(NCCL_PLUGIN + late)] == ["nccl-timeout"]


@pytest.mark.parametrize("hint", [
    "You are attempting to use Flash Attention 2.0 without specifying a torch dtype. This might lead to trouble",
    "2022-11-23 10:00:00.1: W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic "
    "library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared object file: No such file",
])  # fmt: skip
def test_a_hint_comes_after_an_error(hint: str) -> None:
    full = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.35 GiB total capacity; 1.19 GiB free)"
    )
    first, second = diagnose(f"{hint}\n{full}")
    assert (first.cause.name, second.line) == ("cuda-out-of-memory", 1)


def test_an_unknown_error_is_shown_beside_a_known_warning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
                   "ZooError: no zebra\n")  # fmt: skip
    result = CliRunner().invoke(app, ["diagnose", str(log)])
    assert "overflow-skipped" in result.output and "the first real error (line 2): ZooError: no zebra" in result.output


def test_the_error_of_the_rank_that_others_waited_for_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[rank2]: ZooError: no zebra in shard 3\n[Rank 0] Watchdog caught collective operation timeout: "
                   "WorkNCCL(SeqNum=88, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 ms\n")  # fmt: skip
    result = CliRunner().invoke(app, ["diagnose", str(log)])
    assert "nccl-timeout" in result.output and "(line 1): [rank2]: ZooError: no zebra in shard 3" in result.output


@pytest.mark.parametrize("log", [
    "Building extension module fused_adam...\nninja: no work to do.\nLoading extension module fused_adam...\nstep 1",
    "  Building wheel for flash-attn (setup.py): started\n  Building wheel for flash-attn (setup.py): finished with "
    "status 'done'\nSuccessfully built flash-attn",
    "-- Could NOT find NCCL (missing: NCCL_INCLUDE_DIR)\n-- Configuring done",
    "Runtime error during autotuning: No valid triton configs. OutOfMemoryError: out of resource: triton_mm. Ignoring "
    "this choice.\nstep 5 loss 3.0",
])  # fmt: skip
def test_a_healthy_log_has_no_cause(log: str) -> None:
    assert diagnose(log) == []


def test_a_probe_of_cmake_is_no_error() -> None:
    assert first_error("-- Performing Test CMAKE_HAVE_LIBC_PTHREAD - Failed\n-- Configuring done") is None


def test_a_warning_is_no_line_of_code() -> None:
    (one,) = diagnose("/opt/te/__init__.py:10: UserWarning: Detected a Jax (found = 2)\n"
                      "RuntimeError: shape '[2, 8, 128]' is invalid for input of size 1024")  # fmt: skip
    assert "Jax" not in one.message()


def test_a_line_of_a_log_is_no_line_of_code() -> None:
    (one,) = diagnose(" [WARNING]  using untested triton version (3.5.0), only 1.0.0 is known to be compatible\n"
                      "RuntimeError: The size of tensor a (512) must match the size of tensor b (513)")  # fmt: skip
    assert "triton" not in one.message() and "512" in one.message()


@pytest.mark.parametrize(("found", "cuda", "index"), [("11040", "11.4", "cu118"), ("12020", "12.2", "cu126")])
def test_the_torch_for_an_old_driver(found: str, cuda: str, index: str) -> None:
    (one,) = diagnose(f"RuntimeError: The NVIDIA driver on your system is too old (found version {found}).")
    assert f"({cuda})" in one.message() and one.fix().endswith(f"/whl/{index}")


def test_batch_sizes_on_the_next_line() -> None:
    """GPT-NeoX breaks its message there."""
    (one,) = diagnose("AssertionError: Check batch related parameters. train_batch_size is not equal to "
                      "micro_batch_per_gpu * gradient_acc_step * world_size \n32 != 4 * 1 * 4")  # fmt: skip
    assert one.message().endswith(": 32 != 4 * 1 * 4")


@pytest.mark.parametrize(
    "module, fix",
    [
        ("cv2", "pip install opencv-python,"),
        ("cutlass", "pip install nvidia-cutlass-dsl,"),
        ("google.protobuf", "pip install protobuf,"),
        ("cuda.bindings", "pip install cuda-python,"),
        ("google.cloud", "pip install it,"),
        ("apex", "from github.com/NVIDIA/apex"),
        ("transformer_engine", "'transformer_engine[pytorch]'"),
        ("_bz2", "apt install libbz2-dev"),
        ("psutil", "pip install it,"),
    ],
)
def test_the_package_of_a_missing_module_is_named(module: str, fix: str) -> None:
    (found,) = diagnose(f"ModuleNotFoundError: No module named '{module}'")
    assert fix in found.fix() and fix.rstrip(",") in found.fix("zh")


def test_the_standard_of_cpp_that_torch_wants_is_named() -> None:
    (found,) = diagnose("error: #error You need C++20 to compile PyTorch")
    assert "-std=c++20" in found.fix() and "C++20" in found.message()


def test_a_spinner_is_read_to_its_end() -> None:
    (one,) = diagnose("Building wheel for transformer-engine (setup.py) ... -\rBuilding wheel for transformer-engine "
                      "(setup.py) ... \\\r")  # fmt: skip
    assert one.cause.name == "wheel-stuck" and "transformer-engine compiles" in one.message()


def test_a_long_line_takes_no_time() -> None:
    assert diagnose("nvcc " + "-I/x " * 200_000) == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("× pip did not run successfully\nerror: subprocess-exited-with-error\nfoo.cu(12): error: no instance\n",
         (3, "foo.cu(12): error: no instance")),
        ('Traceback:\n  File "a.py", line 3\n[rank0]: torch.cuda.CudaFlux: hm\nzap.ZapError: it broke\n',
         (4, "zap.ZapError: it broke")),
        ("Segmentation fault (core dumped)\n", (1, "Segmentation fault (core dumped)")),
        ("g++ -Wno-error x.cpp\ncopying errors.py -> build\n", None),
        ("[1/2] nvcc a.cu\nFAILED: a.o\n/usr/bin/nvcc -c a.cu -o a.o\na.cu(3): error: no x\nninja: build "
         "stopped\n",
         (4, "a.cu(3): error: no x")),
        ("FAILED: a.o\nninja: build stopped: subcommand failed.\n", (1, "FAILED: a.o")),
        ("[rank0]: Traceback (most recent call last):\n[rank0]:   File \"a.py\", line 3\n[rank0]:     assert x, "
         "'error: y'\nnoise of another rank\n[rank0]: AssertionError\n\nDuring handling of the above exception, "
         "another exception occurred:\n\nTraceback (most recent call last):\n  File \"b.py\", line 1\nValueError: "
         "later\n",
         (5, "[rank0]: AssertionError")),
        ("Traceback (most recent call last):\n  File \"a.py\", line 3\n    f()\nmypackage.Trouble: bent\n",
         (4, "mypackage.Trouble: bent")),
        ("    raise RuntimeError('no')\nRuntimeError:\n  The thing is bent\n", (2, "RuntimeError: The thing is bent")),
        ("CMake Error at a.cmake:3 (message):\n  no such\n", (1, "CMake Error at a.cmake:3 (message): no such")),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  bent\nAborted (core "
         "dumped)\n",
         (2, "what():  bent")),
    ],
)  # fmt: skip
def test_first_real_error(text: str, found: tuple[int, str] | None) -> None:
    assert first_error(text) == found


def test_the_attention_call_of_a_log() -> None:
    call = attention_call(TE_LOG)
    assert call is not None
    line = " ".join(call)
    for words in ("--as transformer-engine --version 2.8.0 --arch sm_100", "--head-dim-qk 192 --head-dim-v 128",
                  "--heads 64 --kv-heads 64", "--layout thd", "--dtype bf16", "--mask padding_causal", "--cudnn 9.10.1",
                  "--flash-attn 2.7.3", "--seqlen 8192"):  # fmt: skip
        assert words in line
    assert "--window" not in line and attention_call("nothing") is None
    other = TE_LOG.replace("(-1, 0)", "(1023, 0)").replace(
        "'max_seqlen_q': 8192", "'max_seqlen_q': tensor(5743, dtype=x)"
    )
    other = other.replace("'2.7.3'", "'not installed'") + "Disabling FusedAttention due to NVTE_FUSED_ATTN=0\n"
    line = " ".join(attention_call(other) or [])
    for words in ("--window 1023,0", "--seqlen 5743", "--flash-attn none", "--set NVTE_FUSED_ATTN=0"):
        assert words in line


# the command


def _run(*args: str, input: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["diagnose", *args], input=input, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_a_pasted_log() -> None:
    said = _run(input=dict(TEXTS)["compiler-killed"])
    assert "compiler-killed" in said and "line 1: c++: fatal error" in said and "fix: powertrain build" in said


def test_a_file_in_chinese(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(dict(TEXTS)["fused-kernels-stuck"])
    said = _run(str(log), "--lang", "zh")
    assert "原因: " in said and "powertrain doctor --only builds --fix" in said


def test_an_unknown_text() -> None:
    said = _run(input="hello\nWidgetError: the widget is bent\n", code=1)
    assert "none of the known causes" in said and "(line 2): WidgetError: the widget is bent" in said
    said = _run(input="hello\n", code=1)
    assert "give the whole log" in said and "the last line (line 1): hello" in said
    assert "不在已知原因之列" in _run("--lang", "zh", input="hello\n", code=1)


def test_the_confidence_is_said() -> None:
    assert "disk-full (certain)" in _run(input="OSError: [Errno 28] No space left on device\n")
    said = _run(input="RuntimeError: CUDA error: unspecified launch failure\n")
    assert "launch-failure (possible" in said and "the first real error (line 1)" in said
    assert "很可能" in _run("--lang", "zh", input="RuntimeError: No CUDA GPUs are available\n")


def test_two_archs_name_the_rebuild() -> None:
    said = _run(
        input="FATAL: kernel `fmha_cutlassF_f16_aligned_64x128_rf_sm80` is for sm80-sm100, but was built for sm75"
    )
    assert 'TORCH_CUDA_ARCH_LIST="7.5 8.6"' in said


def test_what_a_fix_names_of_ours_exists() -> None:
    """powertrain.compat.xformers and the like are importable."""
    for cause in CAUSES:
        for name in re.findall(r"powertrain(?:\.[a-z_]+)+", cause.fix + cause.fix_zh):
            module, _, attribute = name.rpartition(".")
            found = importlib.util.find_spec(name) if module in ("powertrain", "powertrain.compat") else None
            assert found or hasattr(importlib.import_module(module), attribute), (cause.name, name)


def test_the_attention_log_is_explained() -> None:
    said = _run(input=TE_LOG)
    assert "powertrain explain attention --as transformer-engine" in said
    assert "TransformerEngine 2.8.0" in said or "transformer-engine" in said
    assert "triton" in said


def test_json() -> None:
    found = json.loads(_run("--json", input=dict(TEXTS)["driver-old"]))
    assert found["causes"][0]["name"] == "driver-old" and "11040" in found["causes"][0]["cause"]
    assert json.loads(_run("--json", input="x\nfoo: error: y", code=1)) == {
        "causes": [],
        "first_error": [2, "foo: error: y"],
    }


def test_a_missing_file() -> None:
    assert "must be a file or -" in " ".join(_run("nowhere.log", code=2).replace("│", " ").split())


@pytest.mark.parametrize("sizes", [("[768]", "[ ]"), ("[,]", "[2, 512]")])
def test_shapes_without_numbers_are_read_too(sizes: tuple[str, str]) -> None:
    """A log that lost characters on its way."""
    wanted, got = sizes
    (found,) = diagnose(
        f"RuntimeError: Given normalized_shape={wanted}, expected input with shape [*, 768], but got input of size{got}"
    )
    assert found.cause.name == "shape-mismatch"  # not sizes-differ, which says both sizes


def test_what_was_given_is_no_part_of_the_demand() -> None:
    (found,) = diagnose("ValueError: rms_norm: x must be a dense tensor, got a tensor of layout nested\n")
    assert found.groups["advice"] == "make rms_norm: x so: a dense tensor"
    (found,) = diagnose("AssertionError: MXFP8 is not supported on 12.0+ architectures yet.\n")
    assert found.groups["advice"].startswith("leave MXFP8 out, or change 12.0+ architectures;")
