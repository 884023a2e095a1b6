"""Reading configs of our own: files and lines in every error, merging, overrides; and damaged files of both kinds."""

import os
import random
from pathlib import Path

import pytest

from powertrain.train.config.reader import read_config
from powertrain.train.config.schema import RunConfig
from powertrain.train.config.yaml_source import ConfigError
from powertrain.train.schedule import learning_rate

FIXTURES = Path(__file__).parent / "fixtures"
CONFIGS = Path(__file__).parents[2] / "configs"
OURS = FIXTURES / "ours.yml"


def _file(folder: Path, text: str, name: str = "a.yml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _message(*paths: Path, overrides: tuple[str, ...] = (), **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(paths, overrides, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_our_own_config() -> None:
    run = read_config([OURS])
    assert run.format == "powertrain" and "model:" in run.note
    assert run.config.model.architecture == "llama" and run.config.optimizer.lr == 1e-3
    assert [s.weight for s in run.config.data.train] == [0.5, 1.0]
    assert run.config.train.loss_scale.window == 500
    assert run.texts == {"ours.yml": OURS.read_text()}
    rows = {row.key: row for row in run.table}
    assert rows["optimizer.betas"].place == f"{OURS}:23" and rows["optimizer.betas"].disposition == "honoured"


def test_sections_may_be_spread_over_files(tmp_path: Path) -> None:
    more = _file(tmp_path, "train: {seed: 7}\nevaluation: {steps: 3}\n")
    config = read_config([OURS, more]).config
    assert (config.train.seed, config.train.steps, config.evaluation.steps) == (7, 100, 3)


def test_the_model_may_be_on_the_command_line(tmp_path: Path) -> None:
    """Without it the file was read as GPT-NeoX's."""
    file = _file(tmp_path, "data: {train: a}\ntrain: {steps: 3, seq_length: 8}\n")
    run = read_config([file], ["model=llama-1b"])
    assert run.config.model.hidden_size == 2048 and "`train:`" in run.note
    assert _message(file) == "a.yml: model must be a section or the name of a preset, got nothing"


def test_overrides_have_the_schemas_types() -> None:
    overrides = ["train.steps=5", "optimizer.betas=[0.8, 0.9]", "checkpoint.folder=2024", "logging.wandb=null"]
    overrides += ["train.precision=bf16"]
    run = read_config([OURS], overrides)
    config = run.config
    assert config.train.steps == 5 and config.optimizer.betas == (0.8, 0.9)
    assert config.checkpoint.folder == "2024" and config.logging.wandb is None and config.train.precision == "bf16"
    assert run.overrides == tuple(overrides)
    assert {row.key: row.place for row in run.table}["train.steps"] == "command line"


def test_presets(tmp_path: Path) -> None:
    text = "model: {preset: llama-1b, num_layers: 3}\ndata: {train: x}\ntrain: {steps: 1, seq_length: 8}\n"
    model = read_config([_file(tmp_path, text)]).config.model
    assert (model.num_layers, model.hidden_size) == (3, 2048)


@pytest.mark.parametrize(
    "name", ["gpt-neox-125m.yml", "llama-1b.yml", *(f"neox/{n}.yml" for n in ("19M", "125M", "1-3B", "llama-7B"))]
)
def test_the_configs_that_come_with_us(name: str) -> None:
    files = [CONFIGS / name] + ([CONFIGS / "neox/local_setup.yml"] if name.startswith("neox") else [])
    assert isinstance(read_config(files, world_size=8).config, RunConfig)


@pytest.mark.parametrize(
    "text, words",
    [
        ("train: {stepz: 3}", "a.yml:1: train.stepz: unknown key; did you mean train.steps"),
        ("\n\ntrain: {seed: x}", "a.yml:3: train.seed must be a whole number"),
        ("modle: 3", "a.yml:1: modle: unknown key; did you mean model"),
        ("train: {loss_scale: {windw: 3}}", "a.yml:1: train.loss_scale.windw: unknown key; did you mean window"),
        ("train: {steps: 3}", "train.steps must be set once, it is at "),
        ("evaluation:\n  every: 3\n  at_end: 1\n  at_end: 2", "a.yml:4: evaluation.at_end: must be set once"),
        ("model: {vocab_siz: 3}", "a.yml:1: model.vocab_siz: unknown key; did you mean vocab_size"),
        ("model: {norm_eps: -1}", "a.yml:1: model.norm_eps must be greater than 0, got '-1'"),
        ("a: [1, 2", "a.yml:1: must be YAML"),
        ("[1, 2]", "a.yml:1: a config must be a mapping"),
        ("", "a.yml:1: a config must be a mapping of keys to values, got nothing"),
        ("a: &x [*x]", "a.yml:1: a.0: must not contain itself"),
        ("train: {seed: .inf}", "a.yml:1: train.seed: must be a finite number"),
        ("train: {seed: 99999999999999999999}", "a.yml:1: train.seed: must fit in 64 bits"),
        ("a: !!python/name:os.system", "a.yml:1: "),
        ("? [1, 2]\n: 3", "a.yml:1: a key must be a word"),
        ("a: " + "[" * 500, "a.yml: is nested too deeply"),
        ("evaluation: {<<: 3}", "<< must be given a mapping"),
        ("? \x00", "a.yml: must be YAML"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_key(text: str, words: str, tmp_path: Path) -> None:
    message = _message(OURS, _file(tmp_path, text))
    assert words.replace("train.steps", "steps") in message.replace("train.steps", "steps"), message


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.steps", "must be key=value"),
        ("train.steps.more=3", "command line: train.steps must be a section, got 100"),
        ("train.steps=many", "command line: train.steps must be a whole number"),
        ("fp8.keep=fp9", "command line: fp8.keep must be a list, such as [a, b], got 'fp9'"),
        ("checkpoint=3", "command line: checkpoint must be a section, such as {key: value}, got '3'"),
        ("model.hidden_size=65", "model.hidden_size must be a multiple of num_heads (4), got 65"),
        ("train.seq_length=4096", "train.seq_length must be at most model.max_position_embeddings (128), got 4096"),
        ("train.steps=true", "command line: train.steps must be a number, got true"),
        ("checkpoint=true", "command line: checkpoint must be a section, such as {key: value}, got true"),
        ("train.steps=1.5", "command line: train.steps must be a whole number, got '1.5'"),
        ("optimizer.lr=high", "command line: optimizer.lr must be a number, got 'high'"),
        ("data.append_eod=often", "command line: data.append_eod must be true or false, got 'often'"),
        ("optimizer.betas=[0.9,0.95,1]", "optimizer.betas must hold at most 2 entries, got '[0.9, 0.95, 1]'"),
        ("fp8.most_recent=true", "fp8.most_recent must be false unless fp8.recipe is tensor-delayed, got true"),
        ("checkpoint.keep_last=false", "checkpoint.keep_last must be a number"),
        ("checkpoint.extra_steps=[2,-1]", "command line: checkpoint.extra_steps must be at least 0, got [2, -1]"),
        ("data.train=null", "data.train must hold at least one entry, got '[]'"),
        ("data.train=", "data.train must hold at least one entry"),
        ("data.train=hf:", "data.train.0.path must name a data set of the Hub, as in hf:ORG/NAME, got 'hf:'"),
        ("data.tokenizer=hf:", "command line: data.tokenizer must be hf:ORG/NAME with a name of the Hub, got 'hf:'"),
        ("data.tokenizer=train:10", "command line: data.tokenizer must be train:SIZE with 257 to 999999999 ids, got"),
        ("data.split='1e308,1e308,1'", "data.split must have shares whose sum is finite, got '1e308,1e308,1'"),
        ("data.num_workers=10000000", "data.num_workers must be less than or equal to 1024, got '10000000'"),
        ("data.train=' '", "data.train.0.path must be a path, got ' '"),
        ("logging.folder=''", "command line: logging.folder must be a path, got ''"),
        ("data.tokenizer=' '", "command line: data.tokenizer must be a path, got ' '"),
        ("checkpoint.folder=~no-user/x", "checkpoint.folder must be a path in the home folder of a user"),
        ("data.split=nan", "command line: data.split must be one to three shares such as"),
        ("data.split=9,-1", "data.split must be one to three shares such as '969, 30, 1', not all 0, got '9,-1'"),
        ("evaluation=", "evaluation must be a section, such as {key: value}, got nothing"),
        ("logging={folder: 2024}", "logging.folder must be text (in quotes where it looks like a number), got '2024'"),
        ("trian.steps=3", "command line: trian: unknown key; did you mean train"),
        ("model=null", "model must be a section or the name of a preset"),
        ("model.architecture=rwkv", "model.architecture must be one of gpt_neox, llama"),
        ("train.seed=[1", "command line: train.seed: must be YAML"),
    ],
)
def test_overrides_say_what_is_wrong(override: str, words: str) -> None:
    assert words in _message(OURS, overrides=(override,))


@pytest.mark.parametrize("entry", ["{path: book.txt, wieght: 1}", "{path: book.txt, weight: -1}", "{weight: 1}"])
def test_a_wrong_entry_of_a_list_is_one_line(entry: str) -> None:
    message = _message(OURS, overrides=(f"data.train=[{entry}]",))
    assert message.startswith("command line: data.train.0.") and len(message.splitlines()) == 1, message


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.preset=foo", "model.preset must be one of"),
        (
            "model={preset: pythia-70m, architecture: llama}",
            "model.architecture must be gpt_neox with the preset pythia-70m, or left out, got 'llama'",
        ),
        ("model.architecture=3", "model.architecture must be a name, got 3"),
        ("model.hidden_size=65", "model.hidden_size must be a multiple of num_heads (4)"),
        # the key that the message begins with stands in the file
        ("model.num_heads=5", "model.hidden_size must be a multiple of num_heads (5)"),
        ("model.vocab_size=1000000000000", "model.vocab_size must be at most"),
        ("model=foo", "model.preset must be one of"),
        ("train.loss_scale.minimum=1e9", "train.loss_scale.minimum must be at most"),
        ("schedule.min_lr=1", "schedule.min_lr must be at most optimizer.lr (0.001), got 1"),
        ("data.packing=unpacked", None),
    ],
)
def test_a_check_of_a_section_is_placed_at_the_key_that_was_changed(override: str, words: str | None) -> None:
    overrides = (override, "data.order=sequential") if words is None else (override,)
    words = words or "data.order must be neox where data.packing is unpacked"
    assert _message(OURS, overrides=overrides).startswith(f"command line: {words}")


def test_a_floor_above_the_rate_is_refused_but_in_gpt_neoxs_formulas(tmp_path: Path) -> None:
    """`optimizer.lr=1e-6` on top of a config with a floor would train at the floor, without a word."""
    floor = _file(tmp_path, "schedule: {min_lr: 1e-5}")
    message = _message(OURS, floor, overrides=("optimizer.lr=1e-6",))
    assert message == "command line: schedule.min_lr must be at most optimizer.lr (1e-06), got 1e-05"
    read_config([OURS, floor], ["optimizer.lr=1e-5"])
    # theirs has the larger of the two, as there
    theirs = ["optimizer.lr=1e-6", "schedule.clamp=neox", "schedule.kind=linear"]
    config = read_config([OURS, floor], theirs).config
    assert learning_rate(50, 1e-6, config.schedule, 100) == 1e-5


def test_a_command_line_has_no_comments() -> None:
    """`logging.folder="runs/try #2"` wrote to runs/try, where another run's checkpoint was resumed."""
    config = read_config([OURS], ["logging.folder=runs/try #2", "checkpoint.folder=#2"]).config
    assert config.logging.folder == "runs/try #2" and config.checkpoint.folder == "#2"
    assert "train.steps must be a whole number" in _message(OURS, overrides=("train.steps=5 # of 10",))
    kept = ["logging.folder='a #b'", "optimizer.betas=[0.9, 0.99]  # Lion's", "data.train=a#b"]
    config = read_config([OURS], kept).config
    assert config.logging.folder == "a #b" and config.optimizer.betas == (0.9, 0.99)
    assert config.data.train[0].path == "a#b"


def test_a_path_may_begin_with_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become a folder named ~ otherwise."""
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["data.train=~/text", "logging.folder=~/run", "checkpoint.load=~/c", "data.tokenizer=~/t.json"]
    config = read_config([OURS], paths).config
    assert config.data.train[0].path == "/home/me/text" and str(config.folder()) == "/home/me/run"
    assert config.checkpoint.load == "/home/me/c" and config.data.tokenizer == "/home/me/t.json"


def test_all_mistakes_at_once() -> None:
    message = _message(OURS, overrides=("train.seed=x", "evaluation.every=-1", "model.num_heads=0"))
    assert all(key in message for key in ("train.seed", "evaluation.every", "model.num_heads"))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    twin = _file(tmp_path / "sub", "", "ours.yml")
    assert "base names must differ" in _message(OURS, twin)
    assert "cannot be read: No such file" in _message(tmp_path / "none.yml")
    assert "cannot be read" in _message(tmp_path)
    assert "at least one file" in _message()
    binary = tmp_path / "b.yml"
    binary.write_bytes(b"a: \xff\xfe")
    assert "must be UTF-8 text; byte 3" in _message(binary)
    assert read_config([OURS.with_suffix("")]).config.train.steps == 100  # GPT-NeoX finds small.yml for small


def test_merge_keys(tmp_path: Path) -> None:
    text = OURS.read_text().replace("evaluation: {every: 50}", "evaluation: {<<: {every: 9, steps: 4}, every: 8}")
    config = read_config([_file(tmp_path, text, "merged.yml")]).config
    assert (config.evaluation.every, config.evaluation.steps) == (8, 4)


def test_the_format_can_be_given() -> None:
    assert "model: unknown key" in _message(OURS, format="gpt_neox")  # type: ignore[arg-type]
    assert "format must be one of powertrain, gpt_neox" in _message(OURS, format="json")  # type: ignore[arg-type]


def _damaged(text: str, random_: random.Random) -> str:
    """One to four edits: characters and lines dropped, doubled, swapped, words replaced by odd values."""
    odd = "null -1 0 1e400 [] {} True 'x' nan .nan ~ 1.5 *a &a !!set @ [[[ } : - 2001-01-01 0x auto é <<".split()
    odd += ["\t", "\x07", "9" * 23, "- "]
    for _ in range(random_.randint(1, 4)):
        lines = text.split("\n")
        at = random_.randrange(len(lines))
        kind = random_.randrange(6)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(random_.randrange(len(lines)), lines[at])
        elif kind == 2 and ":" in lines[at]:
            lines[at] = lines[at].partition(":")[0] + ": " + random_.choice(odd) + random_.choice(["", ","])
        elif kind == 3 and lines[at]:
            spot = random_.randrange(len(lines[at]))
            lines[at] = lines[at][:spot] + random_.choice(odd) + lines[at][spot + random_.randint(0, 3) :]
        elif kind == 4:
            other = random_.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif lines[at]:
            spot = random_.randrange(len(lines[at]))
            lines[at] = lines[at][:spot] + lines[at][spot + 1 :]
        text = "\n".join(lines) or "x"
    return text


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_configs_give_a_config_or_an_error_that_names_the_place(count: int, tmp_path: Path) -> None:
    local = CONFIGS / "neox/local_setup.yml"
    texts = [path.read_text() for path in (OURS, FIXTURES / "every_quirk.yml", CONFIGS / "neox/125M.yml")]
    random_ = random.Random(7)
    good = bad = 0
    for number in range(count):
        source = texts[number % 3]
        path = _file(tmp_path, _damaged(source, random_), "damaged.yml")
        files = [path, local] if source is texts[2] else [path]
        try:
            assert isinstance(read_config(files).config, RunConfig)
            good += 1
        except ConfigError as error:
            for line in str(error).splitlines():
                place = line.split(": ")[0]
                assert "damaged.yml" in place or "local_setup.yml" in place or line.startswith(("(", "… and ")), line
            bad += 1
    assert good > count // 20 and bad > count // 4  # both kinds were met


def test_a_wrong_model_is_one_error() -> None:
    for override in ("model=3", "model.hiden_size=64"):
        assert _message(FIXTURES / "ours.yml", overrides=(override,)).count("\n") == 0, override


def test_a_config_without_a_name_needs_a_folder(tmp_path: Path) -> None:
    """Two of `powertrain train <(command)` were both runs/63: the second resumed the first."""
    text = "model: pythia-70m\ndata: {train: quickstart}\ntrain: {steps: 1, seq_length: 8}\n"
    for folder in ("", "logging: {folder: runs/x}\n"):
        read, write = os.pipe()
        os.write(write, (text + folder).encode())
        os.close(write)
        try:
            if folder:
                assert str(read_config([f"/dev/fd/{read}"]).config.folder()) == "runs/x"
            else:
                with pytest.raises(ConfigError, match=rf"logging\.folder must be given where .*, got /dev/fd/{read}"):
                    read_config([f"/dev/fd/{read}"])
        finally:
            os.close(read)
