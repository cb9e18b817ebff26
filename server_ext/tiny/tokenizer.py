"""A byte-level BPE tokenizer trained on the maker's own texts."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from server_ext.tiny import chat


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `vocab_size` entries that can spell every text.

    Args:
        texts: the training texts.
        vocab_size: number of entries, with 256 bytes and the special tokens in it.
        context_tokens: the longest input of the model, written into the tokenizer's config.

    Raises:
        ValueError: `texts` are too uniform for that many entries.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(chat.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts give {bpe.get_vocab_size()} tokens, the recipe asks for {vocab_size}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=chat.IM_END,
        pad_token=chat.END_OF_TEXT,
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat.TEMPLATE
    return tokenizer
