"""Tests `python -m brt.prepare --pairs`, which converts raw datasets of pairs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from brt import prepare
from brt.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[4]


def run(*flags):
    prepare.main(prepare.parser().parse_args([*map(str, flags)]))


@pytest.mark.filterwarnings("ignore")  # TFDS itself causes warnings.
def test_what_is_written_and_how_to_read_it(directory, tmp_path, capsys):
    flags = ("--pairs", "media_sum", "--raw", directory("media_sum"), "--output", tmp_path / "out")
    run(*flags)
    told = capsys.readouterr().out
    assert "train: 2 pairs\nval: 2 pairs\ntest: 2 pairs\n" in told
    assert 'Data.validation = ("tfds:media_sum/val",)' in told
    assert f"while TFDS_DATA_DIR={tmp_path / 'out'} is exported" in told
    assert [path.name for path in (tmp_path / "out/media_sum").iterdir()] == ["1.0.0"]
    with pytest.raises(DataError, match="exists; delete it, or name another directory with --out"):
        run(*flags)


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_brt_prepare_reads_the_users_own_files_of_pairs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "d", "gist": "s"}\n{"body": "d", "gist": ""}\n')
    (tmp_path / "b.csv").write_text("gist,body\ns,d\n")
    flags = "--pairs files --name mine --train a.jsonl --test b.csv --source_field body".split()
    flags += ["--target_field", "gist"]

    def command(*more):
        return subprocess.run(
            [sys.executable, "-m", "brt.prepare", *flags, *more], cwd=tmp_path, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TFDS_DATA_DIR": str(tmp_path / "tfds")},
            capture_output=True, text=True,
        )  # fmt: skip

    refused = command()
    assert refused.returncode == 3
    assert refused.stderr.splitlines()[-1] == (
        "brt: error: 1 of 2 rows of train cannot be used: a.jsonl:2 has an empty summary; repair "
        "them, or continue without them with --errors=skip"
    )
    done = command("--errors", "skip")
    assert done.returncode == 0, done.stderr
    assert "train: 1 pairs (1 of 2 rows of train cannot be used: a.jsonl:2 has" in done.stdout
    assert 'Data.test = ("tfds:mine/test",)' in done.stdout
    assert "TFDS_DATA_DIR" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "one of the arguments --documents --pairs is required"),
        ("--pairs cnn", "invalid choice: 'cnn'"),
        ("--pairs xsum", "--pairs xsum needs --raw"),
        ("--pairs xsum --raw x --tokenizer bytes", "--tokenizer has no meaning with --pairs xsum"),
        ("--pairs files --name a", "--pairs files needs --train"),
        ("--pairs files --train x --name A/b", "--name A/b must consist of lower case"),
        ("--pairs xsum --raw x --errors replace", "--errors with --pairs xsum is refuse or skip"),
        ("--documents x --output o --errors skip", "--errors with --documents is strict or rep"),
        ("--documents x", "--documents needs --output"),
        ("--documents x --output o --raw y", "--raw has no meaning with --documents"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        run(*flags.split())
