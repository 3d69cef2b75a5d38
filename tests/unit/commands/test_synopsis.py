"""The options of every command: what each takes, its bounds and its default; each has a sentence of help."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from megatron_daro import cli

SYNOPSIS = """
plan: RECIPE?; 2<= --gpus; A.B=C+; --gpu=h100-80g; --model-config FILE; --mean-response; --mean-prompt; 0<= --price;
  1<= --best <=50=5; --json; --from RUN; --scaling FILE.html; 1<= --mtbf-hours=50000.0; --sync; --write
check-layout: MODEL_CONFIG?; 1<= --world; 1<= --tp=1; 1<= --pp=1; 1<= --vpp=1; 1<= --cp=1; 1<= --ep=1; 1<= --etp;
  1<= --first-layers; 1<= --last-layers; --json
analyze: DUMP; --columns group=A,length=B,right=C; --reward-key KEY; --correct-above; 2<= --rollouts-per-prompt;
  --daro 'A=B ...'; 1<= --tokens-per-gpu-hour; --reflection; --html FILE
curate: DATA... [A.B=C...]+?; --out DIR; --against PATH+; --format=auto; --problem-field NAME; --answer-field NAME;
  --keep-field NAME+; --conflicts=drop; --near/--no-near=True; 5<= --ngram=13; --drop-overlaps; --verifier=math; 1<=
  --workers=2; --drop-guesses A,B; 0<= --largest-integer=10; --proofs/--no-proofs; 0<= --most-gold-words;
  --languages A,B; 0.01<= --most-per-topic <=1; --paraphrases; 0.05<= --alike <=1=0.4; 0<= --guess-tries; --hf DIR;
  --urls URL,...+; 1<= --samples=8; 0<= --temperature=1.0; 0<= --top-p <=1=1.0; --template=chat; --pass-rate
  LOW:HIGH; --write A,B=parquet
shorten: PATH; --out FILE; --for=dpo; 1<= --longer=1.5; 1<= --most; --messages; --tokenizer DIR
submit: RECIPE?; --cluster FILE?; A.B=C+; --dry-run; --test-only/--no-test-only?; 1<= --chain=1
doctor: [RECIPE]?; A.B=C+
check-loss: MODULE:FUNCTION?; --per-token=both; --uses=advantages; --samples=parts; 0<= --seconds=20.0; --seed;
  --script FILE=loss_case.py
train: CONFIG?; A.B=C+; --dry-run; --resume; --replay RUN
eval: CONFIG|A.B=C+; --hf DIR; --checkpoint DIR; --urls URL,...+; --suite NAME; --suite-dir DIR=eval_data; --set
  NAME=FILE+; --samples [SET=]N+; 0<= --temperature; --top-p; --template A,B; --k K+; --out PATH; --compare A B
report: RUN?; --output FILE; --from HOST
convert: --out DIR; --hf DIR; --megatron DIR; --average DIR+; --weights A,B; --hf-config DIR; --format NAME;
  --per-layer-keys; --dtype NAME; --max-shard-size SIZE=5GB; 1<= --processes N; --verify; --dry-run
"""


def words(parameter: Any) -> str:
    """A parameter as one would list it; `?` where a default is not shown, `+` where it may be repeated."""
    name = "/".join([*parameter.opts, *parameter.secondary_opts]) if parameter.param_type_name == "option" else ""
    least = "" if parameter.min is None else f"{parameter.min:g}<="
    most = "" if parameter.max is None else f"<={parameter.max:g}"
    default = "" if parameter.default in (None, False, "") else f"={parameter.default}"
    marks = "+" * bool(parameter.multiple or parameter.nargs == -1) + "?" * (not parameter.show_default)
    return " ".join(filter(None, [least, name, parameter.metavar, most])) + default + marks


def synopsis(command: Any) -> str:
    return "; ".join(words(parameter) for parameter in command.params)


COMMANDS = typer.main.get_command(cli.app).commands


@pytest.mark.parametrize(
    "line", SYNOPSIS.strip().replace("\n  ", " ").splitlines(), ids=lambda line: line.partition(":")[0]
)
def test_a_command_has_these_options(line):
    name, _, expected = line.partition(": ")
    assert synopsis(COMMANDS[name]) == expected


def test_every_command_and_option_is_explained():
    assert COMMANDS.keys() == {line.partition(":")[0] for line in SYNOPSIS.splitlines() if line[:1].isalpha()}
    for name, command in COMMANDS.items():
        assert command.help and command.help.endswith("."), name
        assert [parameter.name for parameter in command.params if not parameter.help] == []
    assert COMMANDS["convert"].epilog.startswith("--check MODEL_CONFIG --world N")


def test_the_program_explains_itself():
    root = typer.main.get_command(cli.app)
    assert root.no_args_is_help and root.help == "Difficulty-aware reinforcement learning (DARO) on Megatron-core."
    (version,) = root.params
    assert (version.opts, version.help, version.is_eager) == (["--version"], "Print the version and end.", True)
