"""The command `sglang-dflash plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

from server_ext.cpu import PLATFORM
from server_ext.errors import UserError
from server_ext.planner.inputs import GPUS, EngineOptions, Memory, Workload, check_number
from server_ext.planner.models import ModelFacts, check_pair, read_model, write_geometry

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    pair = parser.add_argument_group("the pair")
    for role, keys in (
        ("target", "layers=N,kv-heads=N,head-dim=N"),
        ("draft", "layers=N,kv-heads=N,head-dim=N,window=N,block=N"),
    ):
        one = pair.add_mutually_exclusive_group(required=True)
        one.add_argument(f"--{role}", type=Path, metavar="DIR", help=f"folder with the {role}'s config.json")
        one.add_argument(f"--{role}-geometry", metavar=keys, help="or the layers that keep KV; needs --weights-gib")
    pair.add_argument(
        "--weights-gib", type=float, metavar="GIB", help="target and draft weights on one GPU; counted without it"
    )
    pair.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"))

    memory = parser.add_argument_group("the GPUs")
    one = memory.add_mutually_exclusive_group(required=True)
    one.add_argument("--gpu", choices=GPUS, help="a known GPU")
    one.add_argument(
        "--gpu-memory-gib", type=float, metavar="GIB", help="free before the weights load: `avail mem` in the log"
    )
    memory.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of a replica (1)")
    memory.add_argument("--mem-fraction-static", type=float, default=0.8, metavar="F", help="weights and pools (0.8)")

    load = parser.add_argument_group("the requests")
    load.add_argument("--concurrency", type=int, required=True, metavar="N", help="requests at the same time")
    load.add_argument("--prompt-tokens", type=int, default=4096, metavar="N", help="length of a prompt (4096)")
    load.add_argument("--output-tokens", type=int, default=1024, metavar="N", help="length of an answer (1024)")
    load.add_argument("--context-length", type=int, metavar="N", help="longest prompt and answer (the model's)")

    engine = parser.add_argument_group("the engine")
    engine.add_argument("--ratio", type=float, metavar="R", help="look at this draft KV ratio instead of choosing one")
    engine.add_argument("--window", type=int, metavar="N", help="draft window (the draft's own sliding_window)")
    engine.add_argument(
        "--swa-full-tokens-ratio", type=float, metavar="R", help="same for a target with sliding layers"
    )
    engine.add_argument("--page-size", type=int, default=1, metavar="N", help="tokens of a page (1)")
    engine.add_argument(
        "--chunked-prefill-size", type=int, metavar="N", help="tokens of a chunk (SGLang's for the GPU)"
    )
    engine.add_argument("--max-total-tokens", type=int, metavar="N", help="limit of the target's tokens")
    engine.add_argument("--max-mamba-cache-size", type=int, metavar="N", help="states of a linear-attention target")
    engine.add_argument("--mamba-full-memory-ratio", type=float, metavar="R", help="memory of its states to that of KV")

    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw capacity and headroom over the ratio")


_AT_LEAST_ONE = (
    "tensor_parallel_size",
    "concurrency",
    "prompt_tokens",
    "output_tokens",
    "context_length",
    "window",
    "page_size",
    "chunked_prefill_size",
    "max_total_tokens",
    "max_mamba_cache_size",
)


def _check_numbers(args: argparse.Namespace) -> None:
    def option(name: str) -> str:
        return "--" + name.replace("_", "-")

    for name in _AT_LEAST_ONE:
        check_number(option(name), getattr(args, name), 1)
    for name in ("gpu_memory_gib", "weights_gib", "mamba_full_memory_ratio"):
        check_number(option(name), getattr(args, name), 0, bounds="(]")
    for name in ("ratio", "swa_full_tokens_ratio"):
        check_number(option(name), getattr(args, name), 0, 1, bounds="(]")
    check_number(option("mem_fraction_static"), args.mem_fraction_static, 0, 1, bounds="()")


def _options(args: argparse.Namespace, target: ModelFacts, draft: ModelFacts) -> EngineOptions:
    gpu = GPUS.get(args.gpu)
    return EngineOptions(
        target=str(target.folder),
        draft=str(draft.folder),
        max_running_requests=args.concurrency,
        draft_kv_ratio=args.ratio,
        draft_window_size=args.window or draft.window,
        page_size=args.page_size,
        chunked_prefill_size=args.chunked_prefill_size or (gpu.chunked_prefill_size if gpu else 8192),
        mem_fraction_static=args.mem_fraction_static,
        tensor_parallel_size=args.tensor_parallel_size,
        context_length=args.context_length,
        kv_cache_dtype=args.kv_cache_dtype,
        swa_full_tokens_ratio=args.swa_full_tokens_ratio,
        max_mamba_cache_size=args.max_mamba_cache_size,
        mamba_full_memory_ratio=args.mamba_full_memory_ratio,
        max_total_tokens=args.max_total_tokens,
    )


def _memory(args: argparse.Namespace, options: EngineOptions, target: ModelFacts, draft: ModelFacts) -> Memory:
    from server_ext.planner.weights import weights_gib

    gpu = GPUS.get(args.gpu)
    free_gib = gpu.free_gib(options.tensor_parallel_size) if gpu else args.gpu_memory_gib
    if args.weights_gib is not None:
        return Memory(free_gib, args.weights_gib)
    plain = dataclasses.replace(options, draft_kv_ratio=None, swa_full_tokens_ratio=None)
    total_gib = 0.0
    for option, model in (("--target", target), ("--draft", draft)):
        if not model.quantized:
            total_gib += weights_gib(plain, target=model is target)
        elif model.stored_bytes:
            total_gib += model.stored_bytes / options.tensor_parallel_size / _GIB
        else:
            raise UserError(
                f"{option} {model.folder}: its weights are quantized and not in the folder, so their size is unknown; "
                "give --weights-gib, target and draft on one GPU"
            )
    return Memory(free_gib, total_gib)


def _model(args: argparse.Namespace, role: str, scratch: Path) -> ModelFacts:
    geometry = getattr(args, f"{role}_geometry")
    if geometry is None:
        return read_model(f"--{role}", getattr(args, role))
    if args.weights_gib is None:
        raise UserError(f"--{role}-geometry {geometry}: says nothing about weights; give --weights-gib too")
    return read_model(f"--{role}", write_geometry(f"--{role}-geometry", geometry, scratch / role))


def run(args: argparse.Namespace) -> int:
    """Print a plan. Raises `UserError` for bad input and for what the engine would refuse."""
    _check_numbers(args)
    if args.plot:
        from server_ext.planner import plot

        plot.check(args.plot)
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = (_model(args, role, Path(scratch)) for role in ("target", "draft"))
        if args.target and args.draft:
            check_pair(target, draft)
        # Before SGLang is imported: beside a CUDA device it would choose that, and look for its memory.
        os.environ["SGLANG_PLATFORM"] = PLATFORM
        if sys.stderr.isatty():
            print("asking SGLang's own sizing code, which takes half a minute to load …", file=sys.stderr, flush=True)
        from server_ext.planner import report
        from server_ext.planner.plan import make_plan

        options = _options(args, target, draft)
        memory = _memory(args, options, target, draft)
        workload = Workload(args.prompt_tokens, args.output_tokens, args.concurrency)
        plan = make_plan(options, memory, workload, draft.window)
    named = dataclasses.replace(
        plan.options,
        target=args.target_geometry or plan.options.target,
        draft=args.draft_geometry or plan.options.draft,
    )
    plan = dataclasses.replace(plan, options=named)
    print(json.dumps(report.as_json(plan), indent=2) if args.json else report.as_text(plan))
    if args.plot:
        plot.draw(plan, args.plot)
    return 0
