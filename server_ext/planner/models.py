"""What a model's config.json says, read without SGLang, so that a mistake costs no import of many seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_ext.errors import UserError

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_DRAFT_GEOMETRY = {"layers", "kv-heads", "head-dim", "window", "block"}
_TARGET_GEOMETRY = {"layers", "kv-heads", "head-dim"}
# Of a model given by its geometry only; no pool depends on them.
_STAND_IN = {
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(frozen=True)
class ModelFacts:
    """A model folder and what the planner itself reads from it; `window` is a sliding window in tokens."""

    folder: Path
    hidden_size: int
    vocab_size: int
    layers: int
    window: int | None
    quantized: bool
    target_layers: int | None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight files in the folder, 0 without any."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


def read_model(option: str, path: Path) -> ModelFacts:
    """Read a model folder, or a config.json in it. Raises `UserError` for one that is no model's."""
    file = path if path.is_file() else path / "config.json"
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise UserError(
            f"{option} {path}: {error.strerror}; give a folder with the model's config.json, weights are not needed"
        ) from error
    except ValueError as error:
        raise UserError(f"{option} {file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{option} {file}: expected a JSON object, found a {type(config).__name__}")
    return _facts(option, file, config)


def _facts(option: str, file: Path, config: dict[str, Any]) -> ModelFacts:
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    missing = [key for key in _NEEDED if key not in text]
    missing += [key for key in ("architectures", "model_type") if key not in config]
    if missing:
        raise UserError(f"{option} {file}: has no {', '.join(missing)}; take the model's own config.json")
    numbers = {key: text[key] for key in _NEEDED}
    if text.get("sliding_window") is not None:
        numbers["sliding_window"] = text["sliding_window"]
    for key, value in numbers.items():
        if not isinstance(value, int) or value <= 0:
            raise UserError(f"{option} {file}: {key} is {value!r}; it must be a whole number greater than 0")
    return ModelFacts(
        folder=file.parent,
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        layers=text["num_hidden_layers"],
        window=text.get("sliding_window"),
        quantized="quantization_config" in config or "quantization_config" in text,
        target_layers=config.get("num_target_layers"),
    )


def check_pair(target: ModelFacts, draft: ModelFacts) -> None:
    """Raise `UserError` when the draft is not one for the target, whose embedding, head and features it takes."""
    for what, of_target, of_draft in (
        ("hidden_size", target.hidden_size, draft.hidden_size),
        ("vocab_size", target.vocab_size, draft.vocab_size),
        ("num_target_layers", target.layers, draft.target_layers or target.layers),
    ):
        if of_target != of_draft:
            raise UserError(
                f"--draft {draft.folder}: {what} is {of_draft}, and {of_target} for the target {target.folder}; "
                "give the draft that was trained for this target"
            )


def write_geometry(option: str, text: str, folder: Path) -> Path:
    """Write the config.json of a model that is known by ``layers=16,kv-heads=4,head-dim=256`` alone.

    For a target, `layers` are those with a KV cache, all of full attention. A draft's are sliding, and it needs
    ``window`` and ``block`` too. Raises `UserError` for anything else.
    """
    needed = _DRAFT_GEOMETRY if option.startswith("--draft") else _TARGET_GEOMETRY
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if parts.keys() != needed or not all(value.isdecimal() and int(value) > 0 for value in parts.values()):
        wanted = ",".join(
            f"{name}=N" for name in ("layers", "kv-heads", "head-dim", "window", "block") if name in needed
        )
        raise UserError(f"{option} {text}: expected {wanted} with whole numbers greater than 0")
    number = {name: int(value) for name, value in parts.items()}
    config = _STAND_IN | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": number["layers"],
        "num_attention_heads": number["kv-heads"],
        "num_key_value_heads": number["kv-heads"],
        "head_dim": number["head-dim"],
    }
    if needed is _DRAFT_GEOMETRY:
        config |= {
            "architectures": ["DFlashDraftModel"],
            "use_sliding_window": True,
            "sliding_window": number["window"],
            "layer_types": ["sliding_attention"] * number["layers"],
            "block_size": number["block"],
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]},
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
