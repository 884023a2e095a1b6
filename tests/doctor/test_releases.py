"""A lacking name tells which of two libraries is too old; and the other things that diagnose reads in a text."""

import re

import pytest

from powertrain.doctor import releases
from powertrain.doctor.frames import called, caller, own_module, packages
from powertrain.doctor.known_names import RENAMED, ROWS
from powertrain.doctor.library_names import library_of_symbol, package_of_library
from powertrain.doctor.literals import Trigrams
from powertrain.doctor.own_words import statement_and_advice


@pytest.mark.parametrize(
    "function, name, side, spec",
    [
        ("TrainingArguments.__init__", "evaluation_strategy", "newer", "transformers<4.51"),
        ("Trainer.__init__", "processing_class", "older", "transformers>=4.46"),
        # both ends of the table's range: SFTTrainer came with a release that had it, and a later one lost it
        ("SFTTrainer.__init__", "tokenizer", "newer", "trl<0.12"),
        ("LoraConfig.__init__", "trainable_token_indices", "older", "peft>=0.15"),
    ],
)
def test_parameters(function: str, name: str, side: str, spec: str) -> None:
    found = releases.lacking_parameter(function, name, "")
    assert found and (found.side, found.spec) == (side, spec), found


def test_names_modules_and_attributes() -> None:
    older = releases.lacking_name("transformers", "Qwen3Config")
    assert older and (older.side, older.spec) == ("older", "transformers>=4.51")
    newer = releases.lacking_name("huggingface_hub", "cached_download")
    assert newer and newer.side == "newer" and newer.package == "huggingface_hub"
    assert releases.lacking_module("pytorch_lightning.strategies").package == "lightning"  # type: ignore[union-attr]
    gone = releases.lacking_attribute("DataFrame", "append")
    assert gone and gone.instead == "pandas.concat"
    python = releases.lacking_name("collections", "Mapping")
    assert python and python.package == "Python" and python.side == "newer"
    inside = releases.lacking_name("numpy._core", "multiarray")
    assert inside and inside.side == "older"


def test_tags_that_are_no_releases_are_not_the_newest_ones() -> None:
    """Megatron-LM's own tags (1.0 to 23.6) are older than megatron-core's; with them the newest names were "gone"."""
    for module in ("megatron.core.activations", "xformers.ops"):
        found = releases.lacking_module(module)
        assert found and found.side == "older", found
    assert releases.history()["megatron.core"]["versions"][-1].startswith("0.")
    assert releases.history()["xformers"]["versions"][-1].startswith("0.0.")


def test_what_no_table_tells() -> None:
    assert releases.lacking_name("frobnicate", "spin") is None
    # every release has it, so that its absence says nothing of the release
    assert releases.lacking_name("transformers", "BertModel") is None
    assert releases.lacking_parameter("Trainer.__init__", "frobnicate", "") is None
    assert releases.package_of_class("SFTTrainer") == "trl" and releases.package_of_class("Frobnicator") is None


def test_tables_are_well_formed() -> None:
    assert len({row[1] for row in ROWS}) == len(ROWS)
    for package, name, sign, release, _ in ROWS:
        assert package and name and sign in "+-" and release
    for package, known in releases.history().items():
        versions, names = known["versions"], known["names"]
        assert len(versions) > 5, package
        assert all(0 <= first <= last < len(versions) for first, last in names.values()), package
        assert all(ends != [0, len(versions) - 1] for ends in names.values()), package
    assert all(new for new in RENAMED.values())


@pytest.mark.parametrize(
    "lines, expected",
    [
        (['  File "/x/lib/python3.10/site-packages/trl/trainer.py", line 3, in f', "    g()"], "trl"),
        (['  File "C:\\x\\Lib\\site-packages\\peft\\config.py", line 3, in f'], "peft"),
        (['  File "/x/lib/python3.10/site-packages/trl/a.py", line 3', '  File "/home/x/train.py", line 9, in f'],
         "train.py"),
        (['  File "/home/x/train.py", line 9', '  File "/usr/lib/python3.10/importlib/__init__.py", line 126, in f'],
         "train.py"),
        (["/usr/local/lib/python3.8/dist-packages/diffusers/pipeline_utils.py in from_pretrained(cls)"], "diffusers"),
        (["nothing"], "the code that asks for it"),
    ],
)  # fmt: skip
def test_the_last_frame_asked(lines: list[str], expected: str) -> None:
    assert caller(lines) == expected


def test_frames() -> None:
    outer, inner = (f'  File "/x/site-packages/{name}/a.py", line 1, in f' for name in ("trl", "transformers"))
    assert packages([outer, outer, inner, "x"]) == ["trl", "transformers"]
    assert called(['  File "a.py", line 3, in <module>', "    trainer = SFTTrainer("]) == "SFTTrainer"
    assert called(["    super().__init__(**kwargs)"]) is None and called(["words only"]) is None
    assert own_module("training", ['  File "training/train.py", line 3, in <module>'])
    assert own_module("utils", []) and not own_module("tqdm", ['  File "train.py", line 3, in <module>'])


def test_libraries_and_symbols_by_name() -> None:
    assert "libgl1" in (package_of_library("libGL.so.1") or "") and package_of_library("libfrobnicate.so") is None
    assert library_of_symbol("_ZN3MPI8Datatype4FreeEv") == "MPI" and library_of_symbol("frobnicate") is None


@pytest.mark.parametrize(
    "line, below, statement, advice",
    [
        (
            "ValueError: The bell is silent. Please pass clapper=True.",
            [],
            "bell is silent",
            "Please pass clapper=True.",
        ),
        ("RuntimeError: the port is taken.", ["Please specify a different one", ""], "port is taken", "different one"),
        ("ValueError: Cannot use bells without clappers", [], "Cannot use bells", "switch clappers on"),
        ("AssertionError: First dimension should be divisible by tensor size", [], "First", "as a multiple of tensor"),
        (
            "RuntimeError: mha_varlen_fwd: head_size should be a multiple of 8, as well as must be <= 256",
            [],
            "head_size",
            "head_size as a multiple of 8 (pad it)",
        ),
    ],
)
def test_a_message_that_says_what_to_do(line: str, below: list[str], statement: str, advice: str) -> None:
    found = statement_and_advice(line, below)
    assert found and statement in found[0] and advice in found[1], found


@pytest.mark.parametrize(
    "line", ["TypeError: getattr(): attribute name must be string", "OSError: [Errno 95] Operation not supported",
             "RuntimeError: it broke", "RuntimeError: CUDA error. For debugging consider CUDA_LAUNCH_BLOCKING=1"]
)  # fmt: skip
def test_a_message_that_does_not(line: str) -> None:
    assert statement_and_advice(line, []) is None


def test_trigrams_refuse_only_what_is_not_there() -> None:
    text = b"step 17 loss 2.31\n" * 60_000 + b"nvcc fatal: no such thing\n"
    table = Trigrams(text)
    for word in re.findall(rb"[\w ]{4,}", text[-200:]):
        assert table.may_hold(word)
    assert not table.may_hold(b"undefined symbol") and Trigrams(b"small").may_hold(b"anything")
