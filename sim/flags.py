"""The flags of the `simulate` command, and the scenario that they describe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from sim.errors import UserError, unknown

if TYPE_CHECKING:
    from sim.scenario import Scenario

USAGE = """\
simulate --trace FILE [flags]
       simulate --generate SPEC [flags]
       simulate --config scenario.yaml [flags]
       simulate --list [KIND]"""
EPILOG = """\
examples:
  simulate --trace azure.csv
  simulate --trace azure.csv --model llama-3-70b --gpu h100 --tp 4 --replicas 2
  simulate --trace azure.csv --compare chunked,continuous,static --slo ttft=1,tpot=0.05
  simulate --trace my.csv --columns arrival=ts,prompt=in_tok,output=out_tok
  simulate --generate 'poisson:rate=8,n=5000,prompt=lognormal(1020,2735),output=256' --seeds 5
  simulate --trace azure.csv --set engine.max_num_batched_tokens=512 --out results
  simulate --config results/scenario.yaml --json
  simulate --list gpus

Without flags: Llama-3-8B on one A100-80G, vLLM's scheduler and defaults. docs/output.md in the
source explains every number of the output.
"""


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as UserError: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            words = message.split(": ", 1)[1].split()
            if words and words[0].startswith("--"):
                raise unknown("flag", words[0].split("=")[0], self._option_string_actions)
        raise UserError(f"{message} (simulate --help lists the flags)")


def parse(argv: Any = None) -> argparse.Namespace:
    """The flags given. Raises UserError; exits after `--help`."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.list is not None:
        nothing = vars(parser.parse_args([]))
        for name, value in vars(args).items():
            if name != "list" and value != nothing[name]:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"--list only prints what can be named: leave out {flag}")
    return args


def build_parser() -> Parser:
    parser = Parser(
        prog="simulate",
        usage=USAGE,
        description="Simulate an LLM serving system on a trace of requests: latencies,\n"
        "throughput, and whether the system is stable.",
        epilog=EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=24, width=96
        ),
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument_group("what is served (one of --trace, --generate)").add_argument
    add("--trace", metavar="FILE", help="trace in Azure, Mooncake or Vidur format, or --columns")
    add("--columns", metavar="K=COL,..", help="of another file: arrival=ts,prompt=in,output=out")
    add("--format", metavar="NAME", help="format of the trace (default: detected)")
    add("--arrivals", metavar="SPEC", help="arrivals for a trace without: poisson:rate=8")
    add("--skip-bad-rows", action="store_true", help="count rows that cannot be read, and go on")
    add("--generate", metavar="SPEC", help="a synthetic workload instead of a trace")
    add("--start", metavar="S", help="only requests from S seconds on, counted from the first")
    add("--end", metavar="S", help="only requests before S seconds")
    add("--limit", metavar="N", help="only the first N requests of those")
    add("--rate-scale", metavar="X", help="requests come X times faster")
    add = parser.add_argument_group("which system").add_argument
    add("--model", metavar="NAME", help="built-in name, or a Hugging Face config.json")
    add("--gpu", metavar="NAME", help="a100-80g, h100, l40s, ... (--list gpus)")
    add("--tp", metavar="N", help="GPUs per replica (tensor parallel)")
    add("--replicas", metavar="N", help="replicas behind a router")
    add("--profile", metavar="FILE|GPU", help="profile made by `calibrate`, or a built-in one")
    add(
        "--execute", metavar="DEVICE", nargs="?", const="auto",
        help="run the steps on the real engine: cpu, cuda (default: a GPU if there is one)",
    )  # fmt: skip
    add("--wall-clock", action="store_true", help="with --execute: in real time")
    add = parser.add_argument_group("how it is served").add_argument
    add("--policy", metavar="NAME", help="scheduling policy: chunked, ..., or file.py:Class")
    add("--routing", metavar="NAME", help="routing policy: round-robin, ..., or file.py:Class")
    add("--admission", metavar="NAME", help="admission policy: always, ..., or file.py:Class")
    add("--eviction", metavar="NAME", help="eviction policy: lru, ..., or file.py:Class")
    add("--slo", metavar="K=S,..", help="limits in seconds: ttft=1,tpot=0.05,e2e=20")
    add(
        "--set", metavar="PATH=VALUE", action="append", default=[],
        help="any field of a scenario, such as engine.block_size=32 (--list fields)",
    )  # fmt: skip
    add("--config", metavar="FILE", help="scenario.yaml, as --out writes it; flags override it")
    add = parser.add_argument_group("runs").add_argument
    add("--compare", metavar="A,B,..", help="several scheduling policies on the same requests")
    add("--seeds", metavar="N", help="N runs with seeds from --seed on: means with 95 %% intervals")
    add("--seed", metavar="N", help="seed of everything random (default 0)")
    add("--no-fast-forward", action="store_true", help="walk every single step: same result")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document instead of the table")
    add("--out", metavar="DIR", help="write requests, steps, summary and scenario there")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    add = parser.add_argument_group("help").add_argument
    add(
        "--list", metavar="KIND", nargs="?", const="",
        help="what can be named: models, gpus, policies, eviction, admission, routing, fields, "
        "profiles (default: all)",
    )  # fmt: skip
    add("-h", "--help", action="help", help="this text")
    return parser


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario of the flags: `--config` first, then flags, then `--set`, in order."""
    from sim.scenario import Scenario
    from sim.tree import read_yaml, set_path, set_text

    tree = read_yaml(args.config) if args.config is not None else {}
    if args.trace is not None and args.generate is not None:
        raise UserError("give --trace or --generate, not both")
    if args.trace is not None:
        set_path(tree, "trace", args.trace)
        tree.pop("generate", None)
    if args.generate is not None:
        set_path(tree, "generate", args.generate)
        tree.pop("trace", None)
    for flag, path in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            _need_trace(tree, path, flag)
            set_path(tree, path, value)
    if args.columns is not None:
        _need_trace(tree, "trace.columns", "columns")
        set_path(tree, "trace.columns", _pairs(args.columns, "--columns", "ROLE=COLUMN"))
    if args.skip_bad_rows:
        _need_trace(tree, "trace.skip_bad_rows", "skip-bad-rows")
        set_path(tree, "trace.skip_bad_rows", True)
    if args.slo is not None:
        for name, limit in _pairs(args.slo, "--slo", "ttft=SECONDS").items():
            set_path(tree, f"slo.{name.removesuffix('_s')}_s", limit)
    if args.wall_clock:
        if args.execute is None:
            raise UserError("--wall-clock is for --execute: a simulation has no real time")
        set_path(tree, "execute.wall_clock", True)
    if args.no_fast_forward:
        set_path(tree, "fast_forward", False)
    for setting in args.set:
        set_text(tree, setting)
    return Scenario.from_dict(tree)


_FLAGS = {
    "model": "model",
    "gpu": "gpu",
    "replicas": "cluster.replicas",
    "profile": "cost.profile",
    "tp": "engine.tensor_parallel_size",
    "policy": "policy",
    "routing": "routing",
    "admission": "admission",
    "eviction": "eviction",
    "format": "trace.format",
    "arrivals": "trace.arrivals",
    "start": "start_s",
    "end": "end_s",
    "limit": "limit",
    "rate_scale": "rate_scale",
    "seed": "seed",
    "execute": "execute.device",
}


def _need_trace(tree: dict[str, Any], path: str, flag: str) -> None:
    if path.startswith("trace.") and tree.get("trace") is None:
        raise UserError(f"--{flag} is about a trace file: give one with --trace FILE")


def _pairs(text: str, flag: str, form: str) -> dict[str, str]:
    """`a=x,b=y` as a mapping."""
    pairs = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UserError(f"{flag} {text or repr(text)}: write {flag} {form},...")
        if name.strip() in pairs:
            raise UserError(f"{flag} {text}: {name.strip()} is named twice")
        pairs[name.strip()] = value.strip()
    return pairs
