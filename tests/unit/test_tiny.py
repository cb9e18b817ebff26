"""The maker of tiny pairs: configurations, texts, tokenizer, draft maths, and builds that are whole or not there."""

import argparse
import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from server_ext.errors import UserError
from server_ext.tiny import build, chat, command, corpus, documents, recipe, tokenizer
from server_ext.tiny.draft import Draft
from server_ext.tiny.prompts import SAMPLE_PROMPTS
from server_ext.tiny.recipe import RECIPES, Recipe, Stage

QUICK = dataclasses.replace(
    RECIPES["qwen3"],
    name="quick",
    target_stages=(Stage(steps=2, sequences=2, tokens=32), Stage(steps=1, sequences=1, tokens=64)),
    draft_stage=Stage(steps=2, sequences=2, tokens=112),
)
"""A real build of a few seconds; its models know nothing."""


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def any_recipe(request: pytest.FixtureRequest) -> Recipe:
    return request.param


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Name of a pair that is made quickly, with the cache in `tmp_path`."""
    monkeypatch.setitem(recipe.RECIPES, QUICK.name, QUICK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return QUICK.name


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- configurations


def test_draft_config_says_what_the_engine_reads(any_recipe: Recipe) -> None:
    draft, target = any_recipe.draft, any_recipe.target
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["layer_types"] == ["sliding_attention"] * draft["num_hidden_layers"]
    assert (draft["sliding_window"], draft["block_size"], draft["is_causal"]) == (64, 8, False)
    assert draft["hidden_size"] == target["hidden_size"], "embedding and head are the target's"
    assert draft["num_target_layers"] == target["num_hidden_layers"]
    # The engine takes hidden states before a layer, so there is no place to take them after the last one.
    assert max(draft["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"] - 1


def test_draft_config_survives_hugging_face(any_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(any_recipe.draft))
    config = AutoConfig.from_pretrained(tmp_path)
    for key in ("sliding_window", "layer_types", "is_causal", "block_size", "dflash_config"):
        assert getattr(config, key) == any_recipe.draft[key], key


def test_target_config_survives_hugging_face(any_recipe: Recipe, tmp_path: Path) -> None:
    AutoConfig.for_model(**any_recipe.target).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.max_position_embeddings >= 8192
    for key, value in any_recipe.target.items():
        if key not in ("dtype", "rope_parameters", "global_head_dim"):  # Hugging Face keeps these in a form of its own
            assert getattr(config, key) == value, key


def test_mask_token_is_in_the_vocabulary(any_recipe: Recipe) -> None:
    assert any_recipe.draft["dflash_config"]["mask_token_id"] < any_recipe.vocab_size == any_recipe.draft["vocab_size"]


# -- texts


def test_diary_never_repeats_itself() -> None:
    sentences = corpus.diary(corpus.FIRST_HERO, corpus.FIRST_WHEELS)
    seen = [next(sentences) for _ in range(1000)]
    weeks = [tuple(seen[i : i + 7]) for i in range(len(seen) - 6)]
    assert len(set(weeks)) == len(weeks)


def test_documents_are_long_enough_for_every_stage(any_recipe: Recipe) -> None:
    longest = max(stage.tokens for stage in (*any_recipe.target_stages, any_recipe.draft_stage))
    rng = random.Random(3)
    for document in (next(documents.documents(rng)) for _ in range(20)):
        assert sum(len(text.split()) for text, _ in document) > longest


def test_labels_are_the_next_learned_tokens() -> None:
    bpe = tokenizer.train_tokenizer(documents.texts(random.Random(0), 200), vocab_size=600, context_tokens=64)
    source = iter([iter([("Ada keeps", False), (" a diary.", True)])])
    read, learned = len(bpe("Ada keeps")["input_ids"]), bpe(" a diary.")["input_ids"]
    ids, labels = documents.batch(source, bpe, 1, read + len(learned) - 1)
    assert labels[0, : read - 1].tolist() == [-100] * (read - 1)
    assert labels[0, read - 1 :].tolist() == learned
    assert labels[0, read - 1 : -1].tolist() == ids[0, read:].tolist()


def test_sample_prompts_are_of_every_kind() -> None:
    chats = [prompt for prompt in SAMPLE_PROMPTS if prompt.endswith(f"{chat.IM_START}assistant\n")]
    assert len(SAMPLE_PROMPTS) >= 8 and 2 <= len(chats) <= len(SAMPLE_PROMPTS) - 2
    assert max(len(prompt.split()) for prompt in SAMPLE_PROMPTS) > 4 * recipe.WINDOW_TOKENS


# -- draft maths


def test_draft_sees_its_window_and_its_whole_block() -> None:
    config = {**RECIPES["qwen3"].draft, "num_hidden_layers": 1}  # a second layer would carry news between rows
    torch.manual_seed(0)
    draft = Draft(config).eval()
    start, width = 100, 3 * config["hidden_size"]
    features, noise = torch.randn(1, 120, width), torch.randn(1, config["block_size"], config["hidden_size"])

    @torch.inference_mode()
    def run(features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return draft(features, torch.tensor([0]), torch.tensor([start]), noise)[0]

    before = run(features, noise)
    for position, seen_by in ((start, []), (start - 64, []), (start - 63, [0]), (start - 60, [0, 1, 2, 3])):
        changed = features.clone()
        changed[0, position] += 1.0
        rows = (run(changed, noise) != before).any(-1).nonzero()[:, 0].tolist()
        assert rows == seen_by, f"position {position}"
    changed = noise.clone()
    changed[0, -1] += 1.0
    assert (run(features, changed) != before).any(-1).all(), "the last row is seen by the first"


def test_draft_parameters_have_the_checkpoint_names() -> None:
    names = {name for name, _ in Draft(RECIPES["qwen3"].draft).named_parameters()}
    layer = {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
    }
    own = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert names == own | {f"layers.{index}.{name}" for index in range(2) for name in layer}


# -- builds


def test_same_seed_same_files_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(name) + seed)  # the caller's random state must not matter
        build.make(QUICK, seed, tmp_path / name, lambda line: None)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    weights = ("target/model.safetensors", "draft/model.safetensors")
    assert all(first[name] != other[name] for name in weights)


def test_build_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    build.make(QUICK, 1, tmp_path, lambda line: None)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()


def test_tokenizer_spells_everything_and_renders_chats(quick: str) -> None:
    pair = build.ensure(quick)
    loaded = AutoTokenizer.from_pretrained(pair.target)
    assert len(loaded) == QUICK.vocab_size
    for text in ("Ada keeps a diary.", "Grüße, 世界 \n\t{}", *SAMPLE_PROMPTS):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.convert_tokens_to_ids(chat.MASK) == QUICK.draft["dflash_config"]["mask_token_id"]
    assert loaded.eos_token_id == QUICK.target["eos_token_id"] == loaded.convert_tokens_to_ids(chat.IM_END)
    messages = [chat.system("Be brief."), chat.user("Hello!")]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat.render(messages) + f"{chat.IM_START}assistant\n"


def test_second_call_skips_what_is_done(quick: str) -> None:
    lines: list[str] = []
    pair = build.ensure(quick, progress=lines.append)
    assert any("step 2/2" in line for line in lines)
    before = {path: path.stat().st_mtime_ns for path in pair.folder.rglob("*")}
    lines.clear()
    assert build.ensure(quick, progress=lines.append) == pair
    assert lines == [f"quick: already made, {pair.folder}"]
    assert {path: path.stat().st_mtime_ns for path in pair.folder.rglob("*")} == before


def test_seed_and_recipe_have_folders_of_their_own() -> None:
    longer = dataclasses.replace(QUICK, draft_stage=Stage(steps=3, sequences=2, tokens=112))
    assert len({build.digest(QUICK, 0), build.digest(QUICK, 1), build.digest(longer, 0)}) == 3


def test_interrupted_build_leaves_nothing(quick: str, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "draft: step" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.ensure(quick, output=tmp_path / "out", progress=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_another_build_is_replaced_only_by_force(quick: str, tmp_path: Path) -> None:
    pair = build.ensure(quick, output=tmp_path)
    first = contents(pair.folder)
    with pytest.raises(UserError, match=r"quick holds another build of a tiny pair; add --force"):
        build.ensure(quick, seed=9, output=tmp_path)
    assert contents(pair.folder) == first
    build.ensure(quick, seed=9, output=tmp_path, force=True)
    assert contents(pair.folder) != first
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]


def test_foreign_folder_is_never_touched(quick: str, tmp_path: Path) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists and is no tiny pair"):
        build.ensure(quick, output=tmp_path, force=True)
    assert (tmp_path / "quick" / "thesis.txt").read_text() == "years of work"


def test_output_that_cannot_be_written(quick: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*/file/below: Not a directory; choose another --output"):
        build.ensure(quick, output=tmp_path / "file" / "below")


# -- command


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_command_prints_the_folders_last(quick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments(quick, "--output", str(tmp_path))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"target: {tmp_path}/quick/target", f"draft: {tmp_path}/quick/draft"]


def test_unknown_pair_is_named_before_anything_is_made(quick: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown pair 'qwen9'; the pairs are: qwen3, "):
        command.run(arguments(quick, "qwen9", "--output", str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
