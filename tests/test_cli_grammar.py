"""What the command line takes, what it answers to anything else, and that it answers at once."""

import os
import re
import subprocess
import sys

import pytest

import hybridremat
from hybridremat.cli import main as cli
from hybridremat.cli.options import limit_options, shared_options
from support.command_line import QUICK

HEAVY = {"torch", "transformers", "ortools", "rich", "numpy", "networkx", "matplotlib", "jinja2"}
HELPS = [["--help"], *([name, "--help"] for name in cli.COMMANDS)]


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_has_examples_and_loads_nothing_heavy(words):
    code = "import sys; from hybridremat.cli import main as cli\n"
    code += f"try: cli.main({words!r})\nexcept SystemExit: pass\n"
    code += f"assert not {HEAVY!r} & set(sys.modules), {HEAVY!r} & set(sys.modules)"
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:\n  hybridremat " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert os.times().children_user - before < 1.0


def test_the_top_help_names_commands_and_exit_statuses(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(command.help)}$", printed, re.MULTILINE)
    statuses = printed[printed.index("exit status:") :]
    assert re.findall(r"^  (\d+)  ", statuses, re.MULTILINE) == ["0", "1", "2", "130"]


def test_examples_can_be_read_by_the_grammar():
    """Every example line, without what a shell makes of the rest, is understood."""
    texts = [cli.EXAMPLES, *(command.examples for command in cli.COMMANDS.values())]
    lines = [line for text in texts for line in re.findall(r"^  hybridremat (.*)$", text, re.MULTILINE)]
    assert len(lines) >= 15
    for line in lines:
        words = re.split(r" \||  +| your own", line)[0].split()
        assert cli.parse(words).command == words[0]


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hybridremat {hybridremat.__version__}\n"


def test_no_command_shows_the_help_and_is_misuse(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "examples:" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pln", "gpt2"], "there is no command 'pln'; did you mean plan? Commands: demo, plan, "),
        (["-v", "inspekt"], "did you mean inspect?"),
        (["p.json"], "hybridremat inspect p.json"),
        (["plan", "gpt2", "--limt", "50%"], "--limt (did you mean --limit?)"),
        (["plan", "gpt2", "--lim", "50%"], "--lim (did you mean --limit?)"),
        (["plan", "gpt2", "llama", "--limit", "50%"], "not understood: llama"),
        (["plan"], "the following arguments are required: TARGET"),
        (["plan", "gpt2", "--limit"], "--limit: expected one argument"),
        (["plan", "gpt2", "--workers", "few"], "invalid int value: 'few'"),
        (["plan", "gpt2", "--json=yes"], "ignored explicit argument 'yes'"),
    ],
)
def test_misuse_is_answered_with_what_was_meant(capsys, words, message):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.splitlines()[-1].startswith("hybridremat: ")
    assert "Traceback" not in err or "-v" in words


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_before_or_after_the_command_shows_the_traceback(models, capsys, flag, before):
    words = ["plan", "mymodels.py:wrong", "--limit", "50%"]
    assert cli.main([flag, *words] if before else [*words, flag]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["verbose", "quiet", "json"])
def test_flags_hold_wherever_they_stand(flag):
    words = ["plan", "gpt2"]
    assert not getattr(cli.parse(words), flag)
    assert getattr(cli.parse([f"--{flag}", *words]), flag)
    assert getattr(cli.parse([*words, f"--{flag}"]), flag)


def test_all_planning_commands_take_the_shared_options():
    words = ["gpt2", "--set", "n_layer=2", "--set", "batch=1", "--json", "--no-cache"]
    words += ["--device-spec", "h200"]
    words += ["--cost-model", "flops", "--workers", "1", "--dropout", "0.1", "-v", "--quiet"]
    for command in ("plan", "inspect", "frontier", "batch"):
        options = cli.parse([command, *words])
        assert options.sets == ["n_layer=2", "batch=1"]
        assert (options.no_cache, options.device_spec, options.dropout) == (True, "h200", 0.1)
        assert cli.parse([command, "gpt2"]).sets == []
    assert len(shared_options()) == 3 and len(shared_options(target=False)) == 1
    assert limit_options().parse_args([]).reserve == "0"


def test_quiet_leaves_out_warnings(models, capsys):
    words = ["plan", f"{models}:make", "--limit", "99GiB", "--device-spec", "t4", *QUICK]
    assert cli.main(words) == 0
    err = capsys.readouterr().err
    assert err.startswith("hybridremat: warning: the limit of 99.0 GiB is more than t4 has")
    assert err.count("\n") == 1
    assert cli.main([*words, "-q"]) == 0
    assert capsys.readouterr().err == ""


