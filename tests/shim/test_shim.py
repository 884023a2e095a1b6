"""Scripts that know nothing of us find ours under the libraries' names, in every process, with metadata."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from powertrain.shim import LIBRARIES, plan

ROOT = Path(__file__).resolve().parent.parent.parent
TIME = 300


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return _environment(tmp_path)


def _run(names: str, code: str, environment: dict[str, str], tmp_path: Path, *flags: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "powertrain", "shim", *flags, names, "--", sys.executable, str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr + result.stdout


# parts of a script, which `failures` runs
METADATA = """
    import importlib, importlib.metadata as metadata, importlib.util, sys
    given = %r
    by_module = metadata.packages_distributions()
    for distribution, version, modules in given:
        assert metadata.version(distribution) == version, distribution
        for module, ours in modules.items():
            assert importlib.util.find_spec(module), module
            assert by_module[module] == [distribution], (module, by_module[module])
            assert importlib.import_module(module) is importlib.import_module(ours), module
            assert importlib.util.find_spec(module), module
            assert importlib.util.find_spec(ours).name == ours
            assert getattr(importlib.import_module(module), "__version__", version) == version
""" % [tuple(library) for library in LIBRARIES.values()]

MODULES = """
    import importlib.util, pickle
    import flash_attn
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
    from flash_attn.flash_attn_interface import flash_attn_func
    from flash_attn.ops.triton.layer_norm import rms_norm_fn
    import powertrain.compat.flash_attn.layers.rotary as ours
    assert RotaryEmbedding is ours.RotaryEmbedding and flash_attn.layers.rotary is ours
    assert pickle.loads(pickle.dumps(RotaryEmbedding)) is RotaryEmbedding
    assert ours.__spec__.name == ours.__name__
    assert not hasattr(flash_attn, "nothing") and importlib.util.find_spec("flash_attn.models") is None
    for statement, words in {
        "import flash_attn.models": ["flash_attn.models", "layers, losses, modules, ops"],
        "from flash_attn.models.gpt import GPTLMHeadModel": ["flash_attn.models"],
        "from flash_attn import flash_attn_fun": ["flash_attn.flash_attn_fun is not in Powertrain", "flash_attn_func"],
        "from flash_attn.layers.rotary import nothing": ["flash_attn.layers.rotary.nothing", "apply_rotary_emb"],
    }.items():
        try:
            exec(statement)
        except ImportError as error:
            assert all(word in str(error) for word in words), error
        else:
            raise AssertionError(statement)
    try:
        flash_attn.nothing
    except AttributeError as error:
        assert "there is flash_attn_func" in str(error)
"""


def test_child_processes(environment: dict[str, str], tmp_path: Path) -> None:
    code = """
    import importlib.metadata, importlib.util, multiprocessing, subprocess, sys

    def length(index):
        # found, and not imported: torch takes 2 s
        assert importlib.util.find_spec("flash_attn") and importlib.util.find_spec("amp_C")
        return len(importlib.metadata.version("flash_attn"))

    if __name__ == "__main__":
        # as a worker of a DataLoader is, for which this process would import torch
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(length, range(2)) == [5, 5]
        ask = "import flash_attn, amp_C; print(flash_attn.__version__)"
        assert subprocess.check_output([sys.executable, "-c", ask]).strip() == b"2.8.3"
        print("done")
    """
    assert "done" in _run("flash_attn,apex", code, environment, tmp_path)


@pytest.mark.slow  # its processes are those of test_child_processes
def test_torchrun(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flash_attn\nprint('version', flash_attn.__version__)\n")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = [sys.executable, "-m", "powertrain", "shim", "flash_attn", "--", *run]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("version 2.8.3") == 2


def test_install_and_a_module_that_runs_as_a_program(environment: dict[str, str], tmp_path: Path) -> None:
    code = """
    import subprocess, sys
    import powertrain.shim
    assert powertrain.shim.install("flash_attn", "apex", "xformers") == []
    powertrain.shim.install("flash_attn")
    import flash_attn, amp_C
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization import FusedRMSNorm
    import importlib.metadata
    assert importlib.metadata.version("flash_attn") == "2.8.3"
    powertrain.shim.install("flash_attn")
    assert b"memory_efficient_attention" in subprocess.check_output([sys.executable, "-m", "xformers.info"])
    assert sys.path.count(next(p for p in sys.path if "flash_attn-" in p)) == 1
    try:
        powertrain.shim.install("flash-attn")
    except ValueError as error:
        assert "names must be of 'flash_attn'" in str(error)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=TIME
    )
    assert result.returncode == 0, result.stderr


def _real_library(folder: Path) -> None:
    (folder / "flash_attn").mkdir(parents=True)
    (folder / "flash_attn" / "__init__.py").write_text("REAL = True\n")
    (folder / "flash_attn-9.9.dist-info").mkdir()
    (folder / "flash_attn-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flash-attn\nVersion: 9.9\n"
    )


def test_an_installed_library_is_not_shadowed(environment: dict[str, str], tmp_path: Path) -> None:
    _real_library(tmp_path / "real")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'real'}"
    code = "import flash_attn\nprint('real', getattr(flash_attn, 'REAL', False) is True)"
    said = _run("flash_attn", code, environment, tmp_path)
    assert "real True" in said and "flash_attn 9.9 is installed and is used; --force takes ours" in said
    assert "real False" in _run("flash_attn", code, environment, tmp_path, "--force")
    late = "import flash_attn, powertrain.shim\npowertrain.shim.install('flash_attn', force=True)"
    result = subprocess.run([sys.executable, "-c", late], env=environment, capture_output=True, text=True, timeout=TIME)
    assert "flash_attn has been imported already" in result.stderr


def test_mistakes(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script").write_text("echo without a first line that names a shell")
    (tmp_path / "script").chmod(0o755)
    script = str(tmp_path / "script")
    for arguments, words in (
        (["shim", "flash", "--", "true"], "'flash_attn'"),
        (["shim", "flash_attn", "--", "no-program"], "on PATH"),
        (["shim", "flash_attn", "--", script], f"{script}: Exec format error"),
        (["build", "--offline", "--", script], f"{script}: Exec format error"),
    ):
        command = [sys.executable, "-m", "powertrain", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME)
        assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


def test_a_cache_folder_that_cannot_be_written(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment["XDG_CACHE_HOME"] = str(tmp_path / "file")
    command = [sys.executable, "-m", "powertrain", "shim", "apex", "--", "true"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "cannot be written: Not a directory; set XDG_CACHE_HOME" in result.stderr
    with pytest.raises(ValueError, match="names must be a list or tuple of names, got 'apex'"):
        plan("apex")  # type: ignore[arg-type]


TRANSFORMERS = """
    import sys
    import torch
    # transformers takes flash_attention_2 where torch sees a GPU; this one has none
    torch.cuda.is_available = lambda: "transformers" in sys._getframe(1).f_globals.get("__name__", "")
    import transformers
    from transformers.utils import is_flash_attn_2_available
    assert is_flash_attn_2_available()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="flash_attention_2",
    )
    config.dtype = torch.bfloat16
    make = transformers.LlamaForCausalLM._from_config
    ours, eager = (make(config, attn_implementation=name) for name in ("flash_attention_2", "eager"))
    eager.load_state_dict(ours.state_dict())
    ours.float(), eager.float()
    import flash_attn
    import transformers.modeling_flash_attention_utils as utils
    tokens = torch.randint(64, (2, 9))
    padded = torch.ones_like(tokens)
    padded[1, 6:] = 0
    for mask in (None, padded):
        results = []
        for model in (ours, eager):
            model.zero_grad()
            kept = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
            out = model(tokens, attention_mask=mask, labels=kept)
            out.loss.backward()
            results.append((out.loss, *(p.grad for p in model.parameters())))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert utils._flash_fn is flash_attn.flash_attn_func and utils._flash_varlen_fn is flash_attn.flash_attn_varlen_func
"""


# after the first examples of each library's README, on the CPU
EXAMPLES = """
    import torch
    from torch import nn

    from flash_attn import flash_attn_func, flash_attn_qkvpacked_func
    qkv = torch.randn(2, 16, 3, 4, 32, requires_grad=True)
    out = flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=True, window_size=(-1, -1))
    assert torch.equal(out, flash_attn_func(*qkv.unbind(2), causal=True))
    out.sum().backward()

    import flash_attn_interface
    assert torch.equal(flash_attn_interface.flash_attn_func(*qkv.unbind(2), causal=True), out)

    import xformers.ops as xops
    from xformers.ops import SwiGLU
    q, k, v = qkv.detach().unbind(2)
    y = xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask(), p=0.0)
    torch.testing.assert_close(y, out)
    assert SwiGLU(8, 16)(torch.randn(2, 8)).shape == (2, 8)

    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam
    model = nn.Sequential(nn.Linear(8, 8), FusedLayerNorm(8))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    model(torch.randn(4, 8)).square().sum().backward()
    norm, _ = multi_tensor_applier(
        amp_C.multi_tensor_l2norm, torch.zeros(1, dtype=torch.int32), [[p.grad for p in model.parameters()]], False
    )
    assert norm.item() > 0
    optimizer.step()

    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    model, loss = nn.Linear(8, 32), LigerFusedLinearCrossEntropyLoss()
    loss(model.weight, torch.randn(4, 8), torch.randint(32, (4,))).backward()
    assert model.weight.grad is not None

    import transformer_engine.pytorch as te
    norm = te.LayerNorm(8, device="cpu")
    attention = te.DotProductAttention(4, 32, attn_mask_type="causal", qkv_format="bshd")
    torch.testing.assert_close(attention(q, k, v), out.flatten(2))
    assert norm(torch.randn(2, 8)).shape == (2, 8)
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.fp8 import fp8_autocast
    layer = te.TransformerLayer(32, 64, 4, device="cpu")
    with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)):
        layer(torch.randn(4, 2, 32)).sum().backward()
    assert layer.layernorm_mlp.fc1_fp8.fp8_amax.min() > 0
    try:
        te.MXFP8Quantizer()
    except AttributeError as error:
        assert "MXFP8Quantizer is not in Powertrain (needs the products of sm_100" in str(error), error
"""


# in this order in one process with all libraries: the first looks at modules that are not imported yet, the last
# replaces a function of torch
PARTS = {"metadata": METADATA, "modules": MODULES, "examples": EXAMPLES, "transformers": TRANSFORMERS}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each part: what it raised, or nothing."""
    folder = tmp_path_factory.mktemp("shim")
    for name, part in PARTS.items():
        (folder / f"part_{name}.py").write_text(textwrap.dedent(part))
    code = f"""
    import json, traceback
    found = {{}}
    for name in {list(PARTS)}:
        try:
            path = f"{folder}/part_{{name}}.py"
            exec(compile(open(path).read(), path, "exec"), {{"__name__": name}})
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
    """
    said = _run(",".join(LIBRARIES), code, _environment(folder), folder)
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


def test_every_library_has_metadata(failures: dict[str, str]) -> None:
    assert not failures["metadata"], failures["metadata"]


def test_modules_are_ours_and_not_copies(failures: dict[str, str]) -> None:
    assert not failures["modules"], failures["modules"]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_transformers_flash_attention_2(failures: dict[str, str]) -> None:
    assert not failures["transformers"], failures["transformers"]


def test_examples_of_the_readmes(failures: dict[str, str]) -> None:
    assert not failures["examples"], failures["examples"]
