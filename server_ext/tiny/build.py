"""Makes a pair once and finds it again: cache folder, digest, and a build that is whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers.utils import logging

from server_ext.errors import UserError
from server_ext.tiny import chat, corpus, documents, draft, tokenizer, training
from server_ext.tiny.recipe import CONTEXT_TOKENS, Recipe, recipe_named
from server_ext.tiny.training import Progress

DEFAULT_SEED = 0
_MANIFEST = "pair.json"
_TOKENIZER_TEXTS = 600


@dataclass(frozen=True)
class TinyPair:
    """A pair on disk. `target` and `draft` are folders that SGLang takes as model paths."""

    name: str
    seed: int
    folder: Path
    target: Path
    draft: Path
    window_tokens: int
    block_size: int


def digest(recipe: Recipe, seed: int) -> str:
    """Names what a build depends on: recipe, seed, the source of texts and training, and the libraries' versions."""
    parts = [repr(recipe), str(seed), *(version(name) for name in ("torch", "transformers", "tokenizers"))]
    parts += [inspect.getsource(module) for module in (chat, corpus, documents, draft, tokenizer, training)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def cache_folder() -> Path:
    """Where pairs go unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglang-dflash" / "tiny"


def ensure(
    name: str,
    *,
    seed: int = DEFAULT_SEED,
    output: Path | None = None,
    force: bool = False,
    progress: Progress = lambda line: None,
) -> TinyPair:
    """Return the pair `name`, making it first unless the same pair is there already.

    Args:
        name: a key of `RECIPES`.
        seed: what the texts and the first weights are drawn from.
        output: parent folder; the pair goes to `output / name`. The default is a folder of the cache that belongs to
            this very recipe and seed.
        force: make the pair again even if it is there, or if another build of it is in the way.
        progress: called with one line for every stage.

    Raises:
        UserError: unknown pair, or a folder that cannot be written or holds something else.
    """
    recipe = recipe_named(name)
    stamp = digest(recipe, seed)
    folder = output / name if output is not None else cache_folder() / f"{name}-{stamp}"
    pair = TinyPair(
        name=name,
        seed=seed,
        folder=folder,
        target=folder / "target",
        draft=folder / "draft",
        window_tokens=recipe.draft["sliding_window"],
        block_size=recipe.draft["block_size"],
    )
    found = _stamp_in(folder)
    if found == stamp and not force:
        progress(f"{name}: already made, {folder}")
        return pair
    if found is None and folder.exists():
        raise UserError(f"{folder} exists and is no tiny pair; remove it or choose another --output")
    if found is not None and not force:
        raise UserError(f"{folder} holds another build of a tiny pair; add --force to replace it")
    with _scratch_beside(folder) as scratch, _one_at_a_time(folder):
        if not force and _stamp_in(folder) == stamp:
            progress(f"{name}: made by another process, {folder}")
            return pair
        make(recipe, seed, scratch, progress)
        (scratch / _MANIFEST).write_text(json.dumps({"pair": name, "seed": seed, "digest": stamp}, indent=2) + "\n")
        _put(scratch, folder)
    progress(f"{name}: done, {folder}")
    return pair


def _stamp_in(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _MANIFEST).read_text())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _scratch_beside(folder: Path) -> Iterator[Path]:
    """An empty folder on the same file system, removed at the end unless it was moved away."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}; choose another --output") from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for others that make this pair, so that they need not be many."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    with lock:
        try:
            yield
        finally:
            # Who waits for the file that goes finds the pair; were it not there, two may make it, each on its own.
            Path(lock.lock_file).unlink(missing_ok=True)


def _put(scratch: Path, folder: Path) -> None:
    scratch.chmod(0o755)
    for path in scratch.rglob("*.safetensors"):
        path.chmod(0o644)
    if folder.exists():
        shutil.rmtree(folder)
    scratch.replace(folder)


@contextlib.contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """The same numbers on every run: one thread, deterministic kernels, own random state; all put back afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_num_threads(threads)


def make(recipe: Recipe, seed: int, folder: Path, progress: Progress) -> None:
    """Train a pair and write it to `folder`, which exists, as `target` and `draft`."""

    def say(line: str) -> None:
        progress(f"{recipe.name}: {line}")

    rng = random.Random(seed)
    with _repeatable(seed):
        say("training the tokenizer")
        texts = documents.texts(rng, _TOKENIZER_TEXTS)
        bpe = tokenizer.train_tokenizer(texts, vocab_size=recipe.vocab_size, context_tokens=CONTEXT_TOKENS)
        target_model = training.train_target(recipe, bpe, rng, say)
        draft_model = training.train_draft(recipe, target_model, bpe, rng, say)
    say("saving")
    bpe.save_pretrained(folder / "target")
    target_model.bfloat16().save_pretrained(folder / "target")
    (folder / "draft").mkdir()
    weights = {key: value.contiguous() for key, value in draft_model.bfloat16().state_dict().items()}
    save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    (folder / "draft" / "config.json").write_text(json.dumps(recipe.draft, indent=2) + "\n")
