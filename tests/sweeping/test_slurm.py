"""Tests the Slurm job array that runs the points of a sweep."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from brt.errors import ConfigError
from brt.sweeping import slurm

from .conftest import ROOT, Sweeps

GRID = "Sweep.grid = {'Training.seed': (0, 1, 2)}"


def tool(directory: Path, name: str, script: str) -> None:
    """Writes a shell script that replaces a command of Slurm."""
    path = directory / "tools" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_script_is_printed_and_nothing_is_written(
    sweeps: Sweeps, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps.write(GRID)
    sweeps("--slurm=--time=2:00:00 --gres=gpu:1", "--gin.Data.columns='text=a b'")
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=out\n#SBATCH --array=0-2\n")
    assert "\n#SBATCH --time=2:00:00\n#SBATCH --gres=gpu:1\n" in script
    assert f"\ncd {sweeps.directory} || exit 2\n" in script
    assert (
        """set -- --gin_file=sweep.gin '--gin_bindings=Data.columns='"'"'text=a b'"'"'' """
        "--workdir=out\n"
    ) in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert not Path("out").exists()


def test_the_script_for_copying_runs_the_same() -> None:
    assert (ROOT / "launch/slurm/sweep.sh").read_text().endswith(slurm.BODY)


def test_submitting_needs_sbatch_and_says_what_it_says(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeps.write(GRID)
    tool(sweeps.directory, "sbatch", "cat > submitted; echo Submitted batch job 17")
    monkeypatch.setenv("PATH", f"{sweeps.directory}/tools:{os.environ['PATH']}")
    sweeps("--submit", "--slurm=--mem=8G")
    assert capsys.readouterr().out == "Submitted batch job 17\n"
    assert "#SBATCH --mem=8G\n" in Path("submitted").read_text()
    assert Path("out/slurm").is_dir(), "sbatch writes the tasks' output there"
    tool(sweeps.directory, "sbatch", "echo invalid partition >&2; exit 1")
    with pytest.raises(ConfigError, match="sbatch refuses the job: invalid partition"):
        sweeps("--submit")
    monkeypatch.setenv("PATH", str(sweeps.directory))
    with pytest.raises(ConfigError, match="--submit needs sbatch, which is not on this machine"):
        sweeps("--submit")


EVIL = ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "a; touch pwned", "-x", "a b"]


@pytest.mark.parametrize("text", [*EVIL, "a\ntouch pwned\n", "a\n#SBATCH --wrap=x"])
@pytest.mark.parametrize("place", ["workdir", "files", "bindings", "options"])
def test_nothing_in_a_script_runs_but_the_sweep(
    place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"workdir": Path("out"), "files": ["a.gin"], "bindings": ["b"], "options": ""}
    given[place] = {"workdir": Path(text), "options": f'--comment="{text}"'}.get(place, [text])
    try:
        script = slurm.script(3, **given)
    except ConfigError as error:
        assert place in ("workdir", "options") and not text.isprintable() and "SLURM" in str(error)
        return
    head = script.partition("\n\ncd ")[0]  # sbatch reads directives only before the first command.
    assert all(line.startswith("#") for line in head.splitlines())
    shown = script.removesuffix(slurm.BODY) + 'printf "%s\\0" "$@"'
    done = subprocess.run(["bash"], input=shown, capture_output=True, text=True, check=True)
    assert not (tmp_path / "pwned").exists()
    assert place == "options" or text in done.stdout, "and the sweep is told it as it is"
