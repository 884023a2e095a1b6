"""Conversion: runs, Hugging Face and GPT-NeoX into each other, checked by logits; training that starts from them."""

import errno
import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typer.testing import CliRunner

from powertrain.cli import app
from powertrain.models import build, configure, huggingface
from powertrain.models.generate import Sampler, generate
from powertrain.models.peft import save_adapter
from powertrain.nn.lora import lora
from powertrain.train.checkpoint import convert as convert_module
from powertrain.train.checkpoint.convert import LogitsDiffer, convert
from powertrain.train.checkpoint.load import fill, load_model, open_weights
from powertrain.train.checkpoint.store import CheckpointError
from powertrain.train.data import tokenizer as tokenizer_module
from powertrain.train.data.sentencepiece_model import SentencePieceTokenizer
from powertrain.train.data.tokenizer import FileTokenizer, train_tokenizer
from tests.distributed.launch import run_ranks
from tests.train.tiny_run import open_trainer, write_config

CPU = torch.device("cpu")


def _weights(path: Path) -> dict[str, Tensor]:
    return dict(open_weights(path).tensors())


def _same(first: Path, second: Path) -> None:
    expected, found = _weights(first), _weights(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with a checkpoint and a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("run")
    train_tokenizer(iter([f"line {n} of the text, of {n * n} lines" for n in range(200)]), 300).save(
        folder / "tokenizer.json"
    )
    trainer = open_trainer(
        folder, "train.steps=2", f"data.tokenizer={folder}/tokenizer.json", "evaluation.at_end=false",
        sinks=lambda _: [],
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return folder / "run"


def _small(folder: Path, **fields: Any) -> Path:
    """A Hugging Face folder of a small model, without a tokenizer."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    model = build(configure(**{"architecture": "gpt_neox", **sizes, **fields}), device="cpu")
    model.init_weights(1)
    folder.mkdir(parents=True)
    huggingface.write(folder, model.config, model.state_dict().items())
    return folder


def test_a_run_to_everything_and_back(run: Path, tmp_path: Path) -> None:
    """A Llama: run, Hugging Face, GPT-NeoX (two layouts), ours again. The same bits, tokenizer and text."""
    places = {name: tmp_path / name for name in ("hf", "neox", "ours", "neox0", "hf2")}
    steps = [("hf", "hf", {}), ("neox", "neox", {}), ("ours", "powertrain", {}),
             ("neox0", "neox", {"pipe_parallel_size": 0, "model_parallel_size": 2}), ("hf2", "hf", {})]  # fmt: skip
    source = run
    for name, kind, sizes in steps:
        done = convert(open_weights(source), places[name], kind, **sizes)  # type: ignore[arg-type]
        assert done.compared is not None and done.compared.ok and done.compared.largest > 0.01 and not done.notes
        _same(run, places[name])
        source = places[name]
        if kind == "neox":
            # its converter to Hugging Face reads these
            keys = yaml.safe_load((source / "global_step0/configs/config.yml").read_text())
            assert (keys["tokenizer_type"], keys["vocab_file"]) == ("HFTokenizer", str(source / "tokenizer.json"))
            assert Path(keys["vocab_file"]).is_file()
    expected = load_file(places["hf"] / "model.safetensors")
    found = load_file(places["hf2"] / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    prompt = open_weights(run).open_tokenizer().encode("line 7 of")
    texts = []
    for path in (run, *places.values()):
        model, weights = load_model(path, device=CPU)
        assert weights.open_tokenizer().encode("line 7 of") == prompt
        texts.append(generate(model, [prompt], max_new_tokens=5, sampler=Sampler(temperature=0)))
    assert all(text == texts[0] for text in texts)
    assert not list(tmp_path.glob(".*"))


def test_transformers_reads_a_converted_run_and_its_tokenizer(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = convert(open_weights(run), tmp_path / "hf", "hf", dtype=torch.bfloat16)
    assert done.compared is not None and (done.compared.source, done.compared.result) == ("powertrain", "transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = open_weights(run).open_tokenizer()
    assert tokenizer("line 7 of the text")["input_ids"] == ours.encode("line 7 of the text")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype is torch.bfloat16 and model.config.eos_token_id == ours.eod == tokenizer.eos_token_id


_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
_CHAT = [{"role": "user", "content": "line 7"}, {"role": "assistant", "content": "of the text"}]


def _chat_tokenizer(folder: Path, has_file: bool) -> Path:
    """A tokenizer whose chats end with another token than its documents; has_file: with a chat_template.jinja."""
    tokenizer = train_tokenizer(iter([f"line {n} of the text, of {n * n} lines" for n in range(200)]), 300)
    tokenizer.backend.add_special_tokens(["<s>", "<|end|>", "<pad>"])
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>",
              "pad_token": "<pad>"}  # fmt: skip
    if has_file:
        (folder / "chat_template.jinja").write_text(_TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/other.jinja").write_text("other")
    else:
        values["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("place", ["config", "file", "Hub"])
def test_the_chat_template_of_a_run_is_exported(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a local tokenizer, or one of the Hub; through our checkpoints and GPT-NeoX's too."""
    transformers = pytest.importorskip("transformers")
    folder = _chat_tokenizer(tmp_path / "tokenizer", place == "file")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    name = str(folder)
    if place == "Hub":
        read, name = tokenizer_module._transformers, "hf:ORG/NAME"
        monkeypatch.setattr(tokenizer_module, "_transformers", lambda s: theirs if s == "ORG/NAME" else read(s))
    options = ("train.steps=1", f"data.tokenizer={name}", "evaluation.at_end=false")
    trainer = open_trainer(tmp_path, *options, sinks=lambda _: [])
    trainer.fit()
    trainer.close()
    source = tmp_path / "run"
    for number, kind in enumerate(("powertrain", "neox", "hf", "hf")):
        convert(open_weights(source), tmp_path / str(number), kind, check=False)  # type: ignore[arg-type]
        source = tmp_path / str(number)
        again = open_weights(source).open_tokenizer()
        assert again.encode_chat(_CHAT) == theirs.apply_chat_template(_CHAT, return_dict=False), kind
    exported = transformers.AutoTokenizer.from_pretrained(source)
    assert exported.apply_chat_template(_CHAT, tokenize=False) == theirs.apply_chat_template(_CHAT, tokenize=False)
    assert (source / "additional_chat_templates/other.jinja").is_file() == (place == "file")
    values = json.loads((source / "config.json").read_text())
    eod = exported.convert_tokens_to_ids("<|endoftext|>")
    assert values["bos_token_id"] == exported.bos_token_id and values["pad_token_id"] == exported.pad_token_id
    assert values["eos_token_id"] == [exported.eos_token_id, eod]


def test_a_tokenizer_beside_adapters_comes_first(tmp_path: Path) -> None:
    """Who trains adapters on chats saves the tokenizer with its template there."""
    pytest.importorskip("transformers")
    model = load_model(_small(tmp_path / "base", **{**LLAMA, "vocab_size": 320}), device=CPU)[0]
    save_adapter(lora(model, targets=["attention.out"]), tmp_path / "adapter", base=str(tmp_path / "base"))
    assert open_weights(tmp_path / "adapter").tokenizer is None
    beside = _chat_tokenizer(tmp_path / "tokenizer", True)
    for file in beside.glob("*.*"):
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    convert(open_weights(tmp_path / "adapter"), tmp_path / "merged", "hf", check=False)
    assert (tmp_path / "merged/chat_template.jinja").read_text() == _TEMPLATE


def test_the_generation_config_of_a_hugging_face_folder_stays(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf")
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    convert(open_weights(source), tmp_path / "out", "hf", check=False)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": [3, 5]}


@pytest.mark.parametrize("through", [(), ("powertrain",)])
def test_every_key_of_a_hugging_face_config_stays(through: tuple[str, ...], tmp_path: Path) -> None:
    """But for those of what is written anew. Mistral without a window has no other class than its own either."""
    source = _small(tmp_path / "hf", **LLAMA)
    values = json.loads((source / "config.json").read_text())
    values |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    values |= {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": None, "my_key": {"a": [None]}}
    values["dtype"] = values.pop("torch_dtype")
    code = {"auto_map": {"AutoConfig": "code.Config"}}
    (source / "config.json").write_text(json.dumps(values | code))
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    for number, kind in enumerate((*through, "hf")):
        convert(open_weights(source), tmp_path / str(number), kind, check=False)  # type: ignore[arg-type]
        source = tmp_path / str(number)
    assert json.loads((source / "config.json").read_text()) == values
    assert json.loads((source / "generation_config.json").read_text()) == {"temperature": 0.6}
    convert(open_weights(source), tmp_path / "more", "hf", dtype=torch.bfloat16, vocab_size=128, check=False)
    more = json.loads((tmp_path / "more/config.json").read_text())
    assert more == values | {"vocab_size": 128, "dtype": "bfloat16"}


def test_a_padding_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", **LLAMA)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"pad_token_id": 90}))
    with pytest.raises(ValueError, match="pad_token_id must be below the 90 rows of the vocabulary, got 90"):
        convert(open_weights(source), tmp_path / "out", "hf", vocab_size=90)


def test_adapters_with_a_tokenizer_end_answers_by_its_token(tmp_path: Path) -> None:
    source = _small(tmp_path / "base", **{**LLAMA, "vocab_size": 320})
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"eos_token_id": 7, "my_key": 1}))
    adapter = tmp_path / "adapter"
    save_adapter(lora(load_model(source, device=CPU)[0], targets=["attention.out"]), adapter, base=str(source))
    for file in _chat_tokenizer(tmp_path / "tokenizer", True).glob("*.*"):
        (adapter / file.name).write_bytes(file.read_bytes())
    convert(open_weights(adapter), tmp_path / "merged", "hf", check=False)
    merged = json.loads((tmp_path / "merged/config.json").read_text())
    tokenizer = open_weights(adapter).open_tokenizer()
    assert isinstance(tokenizer, FileTokenizer)
    assert merged["my_key"] == 1 and merged["eos_token_id"][0] == tokenizer.special_ids()["eos_token"]


def _sentencepiece(file: Path, count: int) -> Path:
    """A model of so many pieces, as tests/train/data/test_sentencepiece_model.py writes them."""
    pieces = [b"<unk>", *(f"p{n}".encode() for n in range(count - 1))]
    data = b""
    for number, piece in enumerate(pieces):
        inside = b"\x0a" + bytes([len(piece)]) + piece + (b"\x18\x02" if number == 0 else b"")
        data += b"\x0a" + bytes([len(inside)]) + inside
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("count", [40, 512])
def test_a_sentencepiece_model_is_not_taken_for_bytes(count: int, tmp_path: Path) -> None:
    file = _sentencepiece(tmp_path / "some.model", count)
    source = replace(open_weights(_small(tmp_path / "hf", vocab_size=640)), tokenizer=str(file))
    for number, kind in enumerate(("powertrain", "neox", "hf", "powertrain")):
        done = convert(source, tmp_path / str(number), kind, check=False)  # type: ignore[arg-type]
        assert done.notes == ("no tokenizer.json: tokenizer.model is a SentencePiece model",)
        source = open_weights(tmp_path / str(number))
        tokenizer = source.open_tokenizer()
        assert isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.path.read_bytes() == file.read_bytes()
    keys = yaml.safe_load((tmp_path / "1/global_step0/configs/config.yml").read_text())
    assert (keys["tokenizer_type"], keys["vocab_file"]) == ("SPMTokenizer", str(tmp_path / "1/tokenizer.model"))


def test_a_tokenizer_of_the_hub_that_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are converted without it, with a note."""
    transformers = pytest.importorskip("transformers")

    def fails(source: str) -> None:
        raise OSError(f"We couldn't connect to the Hub for {source}")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    source = replace(open_weights(_small(tmp_path / "hf")), tokenizer="hf:NOBODY/NAME")
    done = convert(source, tmp_path / "out", "hf", check=False)
    words = "tokenizer NOBODY/NAME: cannot be read: We couldn't connect to the Hub for NOBODY/NAME"
    assert done.notes == (f"no tokenizer: {words}",)


@pytest.mark.parametrize("fields", [
    {"parallel_residual": True, "rotary_pct": 0.25},
    {"architecture": "deepseek", "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
     "experts_per_token": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
], ids=["neox", "deepseek"])  # fmt: skip
def test_hugging_face_to_ours_and_back(fields: dict[str, Any], tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", **fields)
    for number, kind in enumerate(("powertrain", "hf")):
        done = convert(open_weights(source), tmp_path / str(number), kind)  # type: ignore[arg-type]
        assert done.compared is not None and done.compared.ok
        assert done.notes[0].startswith("no tokenizer: ")
        source = tmp_path / str(number)
    _same(tmp_path / "hf", source)


def test_weights_in_float64(tmp_path: Path) -> None:
    """To Hugging Face it ended in a KeyError; of ours, without a check, nothing could read the result."""
    source = tmp_path / "64"
    convert(open_weights(_small(tmp_path / "hf")), source, "hf", dtype=torch.float64)
    convert(open_weights(source), tmp_path / "again", "hf")
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "float64"
    _same(source, tmp_path / "again")
    words = r"dtype must be given \(fp32, bf16, fp16\): .*, and .*64 holds torch.float64"
    with pytest.raises(ValueError, match=words):
        convert(open_weights(source), tmp_path / "ours", "powertrain", check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["64", "again", "hf"]
    convert(open_weights(source), tmp_path / "ours", "powertrain", dtype=torch.float32)
    assert open_weights(tmp_path / "ours").dtype is torch.float32


def test_tensors_that_do_not_fit_are_named_with_their_folder(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", tie_embeddings=True)
    file, embed, head = source / "model.safetensors", "gpt_neox.embed_in.weight", "embed_out.weight"
    good = load_file(file)
    for changed, words in (
        ({head: good[embed] + 1}, f": {head} must be {embed} where config.json has tie_word_embeddings true"),
        ({"other": torch.zeros(2)}, " must have the tensors of its config; missing [], unknown ['other']"),
        ({embed: torch.tensor(1.0)}, f": {embed} must make embed.weight [96, 32], got []"),
    ):
        save_file(good | changed, file)
        with pytest.raises(ValueError, match=re.escape(f"{source}{words}")):
            load_model(source, device="cpu")
    # some files hold the tied head too
    save_file(good | {head: good[embed].clone()}, file)
    load_model(source, device="cpu")


@pytest.mark.parametrize("rows", [128, 90])
def test_rows_of_vocabulary(rows: int, tmp_path: Path) -> None:
    """More: zeros. Fewer: the last ones go."""
    source = _small(tmp_path / "hf")
    done = convert(open_weights(source), tmp_path / "out", "hf", vocab_size=rows)
    assert done.compared is not None and done.compared.ok
    before, after = _weights(source), _weights(tmp_path / "out")
    for name in ("embed.weight", "head.weight"):
        assert after[name].shape == (rows, 32)
        assert torch.equal(after[name][:90], before[name][:90]) and not after[name][96:].any()
    assert torch.equal(after["norm.weight"], before["norm.weight"])


def test_padding_that_config_json_does_not_count(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "vocab_size": 90}))
    assert open_weights(source).config.vocab_size == 96
    done = convert(open_weights(source), tmp_path / "out", "hf", vocab_size=90)
    assert done.compared is not None and done.compared.source == "powertrain" and done.compared.ok
    assert open_weights(tmp_path / "out").config.vocab_size == 90


def test_fewer_rows_than_the_tokenizer_has(run: Path, tmp_path: Path) -> None:
    size = open_weights(run).open_tokenizer().vocab_size
    with pytest.raises(ValueError, match=f"vocab_size must be at least {size}, the tokenizer's, got {size - 1}"):
        convert(open_weights(run), tmp_path / "out", "hf", vocab_size=size - 1)
    assert not (tmp_path / "out").exists()


def test_a_result_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_weights(_small(tmp_path / "hf"))
    right = convert_module.neox_checkpoint.write

    def wrong(folder: Path, config: Any, tensors: Any, **sizes: Any) -> None:
        turned = ((n, t.roll(1, 0) if n == "layers.1.attention.qkv.weight" else t) for n, t in tensors)
        right(folder, config, turned, **sizes)

    monkeypatch.setattr(convert_module.neox_checkpoint, "write", wrong)
    with pytest.raises(LogitsDiffer, match=r"out: logits must be those of .*hf to 0.0001 .* nothing was kept"):
        convert(source, tmp_path / "out", "neox")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert convert(source, tmp_path / "out", "neox", check=False).compared is None


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    source = open_weights(_small(tmp_path / "hf"))
    with pytest.raises(ValueError, match="model_parallel_size must divide"):
        convert(source, tmp_path / "out", "neox", model_parallel_size=3)
    # no other kind has such a layout
    with pytest.raises(ValueError, match=r"model_parallel_size must be 1 unless .*, got 2 for Hugging Face"):
        convert(source, tmp_path / "out", "hf", model_parallel_size=2)
    with pytest.raises(ValueError, match=r"pipe_parallel_size must be 1 unless .*, got 0 for Powertrain"):
        convert(source, tmp_path / "out", "powertrain", pipe_parallel_size=0)
    with pytest.raises(FileExistsError, match="hf must not exist yet"):
        convert(source, tmp_path / "hf", "neox")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere must be a checkpoint .* got no such path"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="got nothing of the kind"):
        open_weights(tmp_path)
    both = _small(tmp_path / "both")
    (both / "global_step3").mkdir()
    with pytest.raises(FileNotFoundError, match="got Hugging Face and GPT-NeoX"):
        open_weights(both)
    assert open_weights(both, "hf").kind == "hf"
    with pytest.raises(ValueError, match="--config must be given for a GPT-NeoX checkpoint only, got Powertrain's"):
        open_weights(run, configs=[tmp_path / "x.yml"])


def test_commands(run: Path, tmp_path: Path) -> None:
    cli = CliRunner()
    done = cli.invoke(app, ["convert", str(run), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    assert "Powertrain, llama, 2 layers" in done.output and "largest difference of logits" in done.output
    for path in (run, tmp_path / "hf"):
        said = cli.invoke(
            app, ["generate", str(path), "--prompt", "line 7", "--max-new-tokens", "3", "--device", "cpu"]
        )
        assert said.exit_code == 0 and said.output.startswith("line 7"), said.output
    # rich would take it for a style
    named = cli.invoke(app, ["convert", str(tmp_path / "hf"), str(tmp_path / "neox[a]"), "--to", "neox", "--no-check"])
    assert named.exit_code == 0 and f"{tmp_path}/neox[a]: GPT-NeoX" in named.output, named.output
    again = cli.invoke(app, ["convert", str(run), str(tmp_path / "hf"), "--to", "neox"])
    assert again.exit_code == 2 and "must not exist yet" in again.output
    wrong = cli.invoke(app, ["convert", str(run), str(tmp_path / "x"), "--to", "neox", "--from", "hf"])
    assert wrong.exit_code == 2 and "config.json" in wrong.output
    bare = cli.invoke(app, ["generate", str(_small(tmp_path / "bare")), "--prompt", "x"])
    assert bare.exit_code == 2 and "must hold a tokenizer.json" in bare.output


@pytest.mark.parametrize("rows, words", [("9" * 30, "--vocab-size"), (str(1 << 28), "not enough memory")])
def test_a_vocabulary_that_no_machine_holds(rows: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    monkeypatch.setattr(convert_module, "_WRITERS", {"hf": Mock(side_effect=no_memory)})
    source, out = _small(tmp_path / "source"), str(tmp_path / "out")
    done = CliRunner().invoke(app, ["convert", str(source), out, "--to", "hf", "--vocab-size", rows])
    assert done.exit_code == 2 and words in done.stderr, done.output


@pytest.mark.parametrize("kind", ["hf", "powertrain", "neox"])
def test_a_full_disk_is_one_line_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """safetensors, our checkpoints and torch.save each have an error of their own for it."""
    source = _small(tmp_path / "source")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file longer than this may be written: the weights of one layer are
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, unlimited[1]))
    try:
        done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", kind])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    assert done.stderr.count("\n") == 1 and re.search("/out.* (cannot be|was not) written: ", done.stderr)
    assert ".partial" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("to", ["hf", "neox"])
def test_a_umask_without_the_owner_s_rights_is_said_and_nothing_left(to: str, tmp_path: Path) -> None:
    """A folder that its owner may not list stayed beside the destination."""
    source = _small(tmp_path / "source")
    # what root sees too, who may read any folder
    with patch("os.access", lambda path, _: ".partial" not in str(path)), patch("shutil.rmtree"):
        done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "a" / "out"), "--to", to])
    words = f"{tmp_path}/a/out cannot be written: the umask takes its owner's rights\n"
    assert (done.exit_code, done.stderr) == (2, words) and [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_below_stdout_is_not_the_result_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console.print", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    done = CliRunner().invoke(app, ["convert", str(_small(tmp_path / "in")), str(tmp_path / "out"), "--to", "neox"])
    assert (done.exit_code, done.stderr) == (2, "output cannot be written: No space left\n")


LLAMA = {"architecture": "llama", "intermediate_size": 64, "num_heads": 2, "vocab_size": 250}


def _trainer(folder: Path, source: Path, *overrides: str) -> Any:
    options = ("train.steps=1", "evaluation.at_end=false", f"checkpoint.load={source}", "model.vocab_size=256")
    return open_trainer(folder, *options, *overrides, sinks=lambda _: [])


@pytest.mark.parametrize("changed", [(), ("model.max_position_embeddings=96",), ("train.lora.rank=2",)], ids=str)
def test_a_run_that_began_with_a_hugging_face_folder_keeps_its_keys(changed: tuple[str, ...], tmp_path: Path) -> None:
    """But the token ids, which its tokenizer has; and not those of another model."""
    source = _small(tmp_path / "hf", **LLAMA)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"my_key": 1, "eos_token_id": 7}))
    trainer = _trainer(tmp_path, source, *changed)
    trainer.fit()
    trainer.close()
    convert(open_weights(tmp_path / "run"), tmp_path / "out", "hf", check=False)
    written = json.loads((tmp_path / "out/config.json").read_text())
    kept = not any("max_position" in each for each in changed)
    assert written.get("my_key") == (1 if kept else None) and written["eos_token_id"] != 7
    assert written["vocab_size"] == 256 and written["architectures"] == values["architectures"]


@pytest.mark.parametrize("kind", ["hf", "neox", "powertrain"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_starts_from_weights(kind: Any, precision: str, tmp_path: Path) -> None:
    """At step 0, with float32 masters that are those weights, and rows of padding that are zeros."""
    source = _small(tmp_path / "hf", **LLAMA)
    if kind != "hf":
        convert(open_weights(source), tmp_path / kind, kind, check=False)
    trainer = _trainer(tmp_path, tmp_path / kind, f"train.precision={precision}")
    assert trainer.progress.step == 0
    found, expected = trainer.optimizer.tensors(), _weights(source)
    for name, tensor in expected.items():
        assert torch.equal(found[f"model.{name}"][: len(tensor)], tensor), name
    assert not found["model.embed.weight"][250:].any()
    computed = trainer.model.embed.weight
    assert torch.equal(computed[:250], expected["embed.weight"].to(computed.dtype))
    trainer.fit()
    assert trainer.progress.step == 1
    trainer.close()
    # its own checkpoint comes first from now on
    again = _trainer(tmp_path, tmp_path / kind, f"train.precision={precision}")
    assert again.progress.step == 1
    again.close()


def test_training_from_a_run_resumes_it(run: Path, tmp_path: Path) -> None:
    rows = open_weights(run).config.vocab_size
    trainer = _trainer(tmp_path, run, f"model.vocab_size={rows}", "train.steps=3")
    assert trainer.progress.step == 2
    trainer.close()


@pytest.mark.parametrize("fields, overrides, message", [
    ({"norm_eps": 1e-6}, (), "model.norm_eps must be 1e-06 as in .*hf, got 1e-05"),
    ({"num_layers": 3}, (), "model.num_layers must be 3 as in .*hf, got 2"),
    ({"vocab_size": 300}, (), "model.vocab_size must be at least 300 as in .*hf, got 256"),
    ({"architecture": "gpt_neox"}, (), "model.architecture must be gpt_neox"),
])  # fmt: skip
def test_weights_of_another_model(
    fields: dict[str, Any], overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    source = _small(tmp_path / "hf", **{**LLAMA, **fields})
    with pytest.raises(ValueError, match=message):
        _trainer(tmp_path, source, *overrides)


def test_what_may_differ(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", **LLAMA)
    trainer = _trainer(tmp_path, source, "model.rope_theta=5e5", "model.sliding_window=8", "model.num_kv_heads=2")
    assert torch.equal(trainer.optimizer.tensors()["model.norm.weight"], _weights(source)["norm.weight"])
    trainer.close()


def test_weights_alone_are_not_resumed(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", **LLAMA)
    convert(open_weights(source), tmp_path / "run" / "checkpoints", "powertrain", check=False)
    with pytest.raises(CheckpointError, match=r"step_00000000 holds weights only, .* name it in checkpoint.load"):
        _trainer(tmp_path, source)


def test_damaged_weights_change_no_run(tmp_path: Path) -> None:
    source = _small(tmp_path / "hf", **LLAMA)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        _trainer(tmp_path, source)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_get_their_shard(mesh: Any) -> None:
    full = torch.randn(6, 4)
    sharded = distribute_tensor(torch.zeros(6, 4, dtype=torch.bfloat16), mesh, [Shard(0)])
    # a pipeline stage has some of a model's tensors
    fill({"w": sharded}, iter([("of another stage", full), ("w", full)]))
    assert isinstance(sharded, DTensor) and torch.equal(sharded.full_tensor(), full.to(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    ["parallel.tensor=1", "parallel.tensor=2", "parallel.pipeline=2"],
    ids=["fsdp", "tensor-parallel", "stages"],
)
def test_two_ranks_start_from_weights(parallel: str, tmp_path: Path) -> None:
    """A step that moves nothing, and the checkpoint that two ranks wrote holds what they were given."""
    source, config = _small(tmp_path / "hf", **LLAMA), write_config(tmp_path)
    options = (f"checkpoint.load={source}", "train.steps=1", "model.vocab_size=256", parallel,
               "train.gradient_accumulation_steps=2",
               "optimizer.lr=1e-12", "evaluation.at_end=false", "logging.report=false")  # fmt: skip
    ranks = run_ranks(2, "-m", "powertrain", "train", str(config), *options)
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(rank.stdout[-3000:] for rank in ranks)
    found = _weights(tmp_path / "run")
    for name, expected in _weights(source).items():
        torch.testing.assert_close(found[name][: len(expected)], expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_conversion_that_is_ended_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = _small(tmp_path / "in"), convert_module._WRITERS["neox"]

    def ended(folder: Path, *options: Any) -> None:
        write(folder, *options)
        os.kill(os.getpid(), number)

    monkeypatch.setitem(convert_module._WRITERS, "neox", ended)
    # the tests may run under nohup, which ignores SIGHUP
    handler = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, handler)
    try:
        done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "a/b/out"), "--to", "neox"])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    # folders that were made for it are gone too
    assert done.exit_code == 128 + number and [path.name for path in tmp_path.iterdir()] == ["in"]
    said = f"{number.name} ended the conversion: {tmp_path}/a/b/out was not written, and nothing of it is left"
    assert said in done.output.replace("\n", " ")


def test_what_a_killed_conversion_left_goes_with_the_next(tmp_path: Path) -> None:
    source = _small(tmp_path / "in")
    old, new, others = (tmp_path / f".{name}.partial" for name in ("out.1", "out.2", "outer.3"))
    for folder in (old, new, others):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    for path in (old / "model.safetensors", old, others / "model.safetensors", others):
        os.utime(path, (0, 0))
    convert(open_weights(source), tmp_path / "out", "neox", check=False)
    assert not old.exists() and new.exists() and others.exists()
