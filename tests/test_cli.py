"""The command line, each time as a process of its own: output, exit status, what stops it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stepgraph
from stepgraph.demo import RECORDING
from stepgraph.recording import MAGIC
from tests import recordings

GROUPS = recordings.MIXED[:2]
STEPS = [s for s in recordings.run(GROUPS, 40) if s.ints["num_reqs"]]
# Before the command runs: recurrent groups read the column behind the right one.
MISCOMPILE = """
from dataclasses import replace
from stepgraph.pipeline import host
right = host.cpu.generate
def wrong(plan):
    source = right(plan)
    return replace(source, text=source.text.replace("div32(", "1 + div32("))
host.cpu.generate = wrong
"""
HIDE_MATPLOTLIB = "import sys; sys.modules['matplotlib'] = None\n"


def run(
    *args: str, cwd: Path | None = None, before: str | None = None, check: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepgraph", *args]
    if before is not None:
        code = f"{before}\nfrom stepgraph.cli import main\nsys.exit(main({list(args)!r}))"
        command = [sys.executable, "-c", "import sys\n" + code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr; nothing is on stdout."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("stepgraph: ")
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.sgs"


@pytest.mark.parametrize("command", [[], ["demo"], ["replay"], ["bench"], ["bench", "vllm"]])
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = run(*command, "--help", check=0)
    assert done.stdout.startswith("usage: stepgraph")
    assert "\nexample: stepgraph " in done.stdout or "\nStart with: stepgraph " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["dance"],
        ["replay"],
        ["replay", "a", "b"],
        ["bench"],
        ["bench", "vllm"],
        ["bench", "vllm", "--model", "m", "--batch", "0"],
        ["demo", "--plot", "a", "--no-plot"],
    ],
)
def test_bad_usage_is_status_2(args: list[str]) -> None:
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: stepgraph")


def test_version_and_the_installed_command() -> None:
    assert run("--version", check=0).stdout == f"stepgraph {stepgraph.__version__}\n"
    script = Path(sys.executable).with_name("stepgraph")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"stepgraph {stepgraph.__version__}\n"


def test_help_needs_no_compiler() -> None:
    code = (
        "import sys; from stepgraph.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numba', 'llvmlite', 'matplotlib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# -- replay


def test_replay_json_is_one_object_and_nothing_else(path: Path) -> None:
    recordings.write(path, STEPS, GROUPS)
    done = run("replay", str(path), "--json", check=0)
    result = json.loads(done.stdout)
    assert done.stderr == ""
    assert (result["steps"], result["mismatches"]) == (len(STEPS), 0)
    assert result["us_per_step"] > 0


def test_progress_goes_to_stderr(path: Path) -> None:
    recordings.write(path, STEPS, GROUPS)
    done = run("replay", str(path), "--json", "--progress", check=0)
    json.loads(done.stdout)
    assert f"timing: {len(STEPS)}/{len(STEPS)}\n" in done.stderr


def test_replay_in_words(path: Path) -> None:
    recordings.write(path, STEPS, GROUPS)
    text = run("replay", str(path), check=0).stdout
    assert f"{len(STEPS)} steps, up to 4 requests, 2 recurrent groups" in text
    assert "0 mismatches" in text and "us per step" in text


def test_a_mismatch_is_counted_said_and_status_1(path: Path) -> None:
    recordings.write(path, STEPS, GROUPS)
    done = run("replay", str(path), "--json", before=MISCOMPILE, check=1)
    result = json.loads(done.stdout)
    assert result["mismatches"] == 2 * len(STEPS)
    assert "state_indices[mamba]" in result["differences"][0]
    done = run("replay", str(path), before=MISCOMPILE, check=1)
    assert f"{2 * len(STEPS)} mismatches" in done.stdout
    assert f"... and {2 * len(STEPS) - 10} more" in done.stdout


def test_a_cut_file_is_replayed_and_said_to_be_cut(path: Path) -> None:
    recordings.write(path, STEPS, GROUPS)
    path.write_bytes(path.read_bytes()[:-1])
    done = run("replay", str(path), check=0)
    assert f"{len(STEPS) - 1} steps" in done.stdout and "the file was cut" in done.stdout


def test_unreadable_files_are_one_clear_line(path: Path, tmp_path: Path) -> None:
    def replay() -> str:
        return error_line(run("replay", str(path), "--json"))

    assert "No such file" in replay()
    assert "folder" in error_line(run("replay", str(tmp_path)))
    path.write_bytes(b"")
    assert "not a step file" in replay()
    path.write_bytes(b"PK\x03\x04 something else entirely")
    assert "not a step file" in replay()
    path.unlink()
    whole = recordings.write(path, STEPS, GROUPS).read_bytes()
    path.write_bytes(whole[:30])
    assert "cut within its header" in replay()
    at = len(MAGIC)
    path.write_bytes(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :])
    assert "step-file format 99" in replay()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    assert "damaged" in replay()
    path.unlink()
    recordings.write(path, STEPS, GROUPS, head={"groups": "none"})
    assert "no list of groups" in replay()


def test_ctrl_c_stops_with_status_130_and_no_traceback(path: Path) -> None:
    recordings.write(path, STEPS * 200, GROUPS)
    command = [sys.executable, "-m", "stepgraph", "replay", str(path), "--json", "--progress"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, and what they start, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stderr is not None
        seen = []
        for line in child.stderr:
            seen.append(line)
            if line.startswith("checking against the oracle: "):
                child.send_signal(signal.SIGINT)
                break
        out, err = child.communicate(timeout=120)
    assert child.returncode == 130, "".join(seen) + err
    assert out == ""
    assert err.endswith("\nstopped\n") and "Traceback" not in err


def test_a_closed_pipe_is_no_failure(path: Path) -> None:
    for args in (["replay", str(recordings.write(path, STEPS, GROUPS))], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "stepgraph", *args]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=300)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


# -- demo


def test_the_recording_is_there() -> None:
    assert RECORDING.is_file()


def test_demo_json_has_the_rows_of_the_table(tmp_path: Path) -> None:
    result = json.loads(run("demo", "--json", cwd=tmp_path, check=0).stdout)
    assert result["mismatches"] == 0 and result["outputs_checked"] > 1000
    rebuild, share, compiled = result["rows"]
    assert [rebuild["ratio"], rebuild["share"]] == [1.0, 1.0]
    for row in (share, compiled):
        assert row["ratio"] == pytest.approx(rebuild["us_per_step"] / row["us_per_step"], rel=0.02)
        assert row["share"] == pytest.approx(row["us_per_step"] / rebuild["us_per_step"], rel=0.02)
    have = importlib.util.find_spec("matplotlib") is not None
    assert result["plot"] == ("stepgraph-demo.png" if have else None)
    assert (tmp_path / "stepgraph-demo.png").is_file() == have


def test_demo_prints_the_table_and_writes_no_plot_if_told(tmp_path: Path) -> None:
    text = run("demo", "--no-plot", cwd=tmp_path, check=0).stdout
    for words in ("rebuild every group", "share by hand", "compiled by stepgraph", "us per step"):
        assert words in text
    assert "0 differ" in text
    assert list(tmp_path.iterdir()) == []


def test_demo_without_matplotlib(tmp_path: Path) -> None:
    done = run("demo", cwd=tmp_path, before=HIDE_MATPLOTLIB, check=0)
    assert "compiled by stepgraph" in done.stdout
    assert "matplotlib is not installed" in done.stderr
    done = run("demo", "--json", cwd=tmp_path, before=HIDE_MATPLOTLIB, check=0)
    assert json.loads(done.stdout)["plot"] is None
    done = run("demo", "--plot", "a.png", cwd=tmp_path, before=HIDE_MATPLOTLIB)
    assert "matplotlib is not installed" in error_line(done)


def test_demo_where_the_plot_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "no plot: " in error_line(run("demo", "--plot", str(tmp_path / "no" / "such.png")))


def test_demo_reports_a_mismatch(tmp_path: Path) -> None:
    done = run("demo", "--json", "--no-plot", cwd=tmp_path, before=MISCOMPILE, check=1)
    assert json.loads(done.stdout)["mismatches"] > 0
