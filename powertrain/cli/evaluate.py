"""`powertrain evaluate`: scores of a model on tasks of lm_eval."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from powertrain.cli.generate import device_of
from powertrain.cli.paths import end_unwritten, must_exist, must_take_a_file, one_line
from powertrain.runtime.console import Console


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="a run's folder, or a checkpoint: ours, Hugging Face's, GPT-NeoX's")
    ],
    tasks: Annotated[str, typer.Option(help="names of lm_eval tasks, separated by commas")],
    tasks_folder: Annotated[
        Path | None, typer.Option(help="folder of YAML files that define tasks", show_default=False)
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="examples in the prompt; default: the task's")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="number of documents of each task; default: all")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    output: Annotated[Path | None, typer.Option(help="JSON file to write the results to", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="such as cuda:1; default: the first GPU, or the CPU")] = None,
) -> None:
    """Evaluate a model on lm_eval's tasks (pip install 'powertrain\\[evaluate]').

    \b
    powertrain evaluate runs/quickstart --tasks lambada_openai,piqa
    powertrain evaluate pythia-160m --tasks mine --tasks-folder tasks --limit 100
    """
    must_exist([checkpoint, *([tasks_folder] if tasks_folder else [])])
    if output is not None:
        must_take_a_file(output, "--output")
    from powertrain.runtime.extras import require

    require("evaluate", "powertrain evaluate")
    from powertrain.train.checkpoint.load import load_model
    from powertrain.train.evaluation import Scorer
    from powertrain.train.tasks import run_tasks

    console = Console(soft_wrap=True)
    with one_line(ValueError, OSError):
        model, weights = load_model(checkpoint, device=device_of(device))
        weights.need_head("the checkpoint")
        scorer = Scorer(model, weights.open_tokenizer(), batch_size=batch_size)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        results = run_tasks(scorer, names, folder=tasks_folder, num_fewshot=num_fewshot, limit=limit)
    table = Table("task", "metric", "value", "±", box=None)
    for task, metrics in results.items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                kind, comma, filtered = name.partition(",")
                spread = metrics.get(f"{kind}_stderr{comma}{filtered}")
                table.add_row(task, name, f"{value:.4f}", "" if spread is None else f"{spread:.4f}")
    console.print_table(table)
    # after the table: what took hours is on the screen even where the file cannot be written
    if output is not None:
        try:
            output.write_text(json.dumps(results, indent=1) + "\n")
        except OSError as error:
            end_unwritten(f"--output {output}", error)
