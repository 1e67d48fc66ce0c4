"""Command line: `stepgraph` and `python -m stepgraph`.

Exit status: 0 all right, 1 a mismatch was found, 2 bad usage or an unreadable file, 130 stopped
with Ctrl-C. With --json, exactly one JSON object goes to stdout; progress and errors go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stepgraph._version import __version__

OK, MISMATCH, BAD, STOPPED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        try:
            args = parser().parse_args(argv)
            return int(args.run(args))
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be told from a failure
    except KeyboardInterrupt:
        _say("\nstopped")
        return STOPPED
    except BrokenPipeError:  # the reader of a pipe went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="stepgraph",
        description="Compile the per-step attention metadata of LLM engines.",
        epilog="Start with: stepgraph demo",
    )
    top.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="replay a recorded run of a hybrid model in three ways, and compare their times",
        description="Replay the recorded run that ships with stepgraph. Its metadata is built in "
        "three ways (every group anew; shared by hand; compiled), checked bit for bit, and timed. "
        "Needs no engine, no GPU. The first run compiles, which takes a few seconds.",
        epilog="example: stepgraph demo --plot times.png",
    )
    picture = demo.add_mutually_exclusive_group()
    picture.add_argument(
        "--plot", metavar="PATH", help="where the plot goes (default: stepgraph-demo.png)"
    )
    picture.add_argument("--no-plot", action="store_true", help="write no plot")
    _common(demo)
    demo.set_defaults(run=_demo)

    replay = commands.add_parser(
        "replay",
        help="re-run a step file, check every output, and time it",
        description="Re-run the steps in a step file (written under STEPGRAPH_VLLM=record) on the "
        "compiled step, compare every output with the NumPy oracle bit for bit, and time it. "
        "us_per_step: median time to stage the host inputs and replay.",
        epilog="example: stepgraph replay steps.sgs --json",
    )
    replay.add_argument("file", metavar="FILE", help="a step file (.sgs)")
    _common(replay)
    replay.set_defaults(run=_replay)

    bench = commands.add_parser(
        "bench",
        help="measure a real engine with and without stepgraph",
        description="Measure a real engine with and without stepgraph.",
        epilog="example: stepgraph bench vllm --model ./granite-4.0-h-tiny",
    )
    engines = bench.add_subparsers(title="engines", metavar="ENGINE", required=True)
    vllm = engines.add_parser(
        "vllm",
        help="vLLM, native and compiled in turn (needs vLLM installed)",
        description="Run vLLM with stepgraph off and on, in turn, in one command: medians, ratio, "
        "share of the step, counters.",
        epilog="example: stepgraph bench vllm --model ./granite-4.0-h-tiny --batch 8 --json",
    )
    vllm.add_argument("--model", metavar="DIR", required=True, help="folder of the model")
    vllm.add_argument("--batch", metavar="N", type=_positive, default=8, help="requests (8)")
    vllm.add_argument(
        "--tokens", metavar="N", type=_positive, default=64, help="tokens a request (64)"
    )
    vllm.add_argument(
        "--repeat", metavar="N", type=_positive, default=3, help="runs of each kind (3)"
    )
    vllm.add_argument("--no-prefix-caching", action="store_true", help="turn prefix caching off")
    _common(vllm, progress=False)
    vllm.set_defaults(run=_bench_vllm)
    return top


def _common(command: argparse.ArgumentParser, progress: bool = True) -> None:
    command.add_argument("--json", action="store_true", help="one JSON object on stdout, no text")
    if progress:
        command.add_argument(
            "--progress",
            action="store_true",
            default=None,
            help="show progress on stderr even if that is no terminal",
        )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


# -- commands. What they need is imported when they run, so that --help is quick.


def _demo(args: argparse.Namespace) -> int:
    from stepgraph import demo
    from stepgraph.pipeline.errors import StepGraphError
    from stepgraph.progress import Progress
    from stepgraph.recording import StepFileError

    try:
        with Progress(args.progress) as progress:
            result = demo.demo(progress)
    except (StepGraphError, StepFileError) as err:
        return _bad(err)
    written: str | None = None
    if not args.no_plot:
        path = Path(args.plot or "stepgraph-demo.png")
        try:
            written = str(path) if demo.plot(result, path) else None
            problem = "matplotlib is not installed: pip install 'stepgraph[plot]'"
        except (OSError, ValueError) as err:
            problem = str(err)
        if written is None and args.plot:
            return _bad(f"no plot: {problem}")
        if written is None and not args.json:
            _say(f"(no plot: {problem})")
    if args.json:
        print(json.dumps({**result.to_dict(), "plot": written}))
    else:
        print(demo.table(result))
        if written is not None:
            print(f"plot: {written}")
    return MISMATCH if result.mismatches else OK


def _replay(args: argparse.Namespace) -> int:
    from stepgraph.pipeline.errors import StepGraphError
    from stepgraph.progress import Progress
    from stepgraph.recording import StepFileError
    from stepgraph.replay import replay

    try:
        with Progress(args.progress) as progress:
            result = replay(args.file, progress)
    except (StepGraphError, StepFileError, OSError) as err:
        return _bad(err)
    if args.json:
        print(json.dumps(result.to_dict()))
        return MISMATCH if result.mismatches else OK
    print(
        f"{result.file}: {result.steps} steps, up to {result.max_batch} requests, {result.groups} "
        f"(written by {result.producer})"
    )
    if result.truncated_bytes:
        print(
            f"the file was cut: {result.truncated_bytes} bytes of a last, unfinished step left out"
        )
    print(f"{result.outputs_checked} outputs checked bit for bit, {result.mismatches} mismatches")
    for text in result.differences:
        print(f"  {text}")
    if len(result.differences) < result.mismatches:
        print(f"  ... and {result.mismatches - len(result.differences)} more")
    print(f"{result.us_per_step:.2f} us per step (median; 99 % are below {result.p99_us:.2f} us)")
    return MISMATCH if result.mismatches else OK


def _bench_vllm(args: argparse.Namespace) -> int:
    from stepgraph import bench_vllm

    return int(bench_vllm.main(args))


def _bad(what: object) -> int:
    text = " ".join(str(what).split())
    _say(f"stepgraph: {text}")
    return BAD


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
