"""Texts for language models: reading files, choosing the tokens to learn, packing rows.

How a file becomes batches::

    tokenizer = ChatTokenizer.from_pretrained(folder)
    train, validation = load_texts(path, tokenizer, TextOptions(sequence_length=2048))
    print(train.summary())
    rows = PackedRows(train.examples, 2048, batch_size=1, seed=0)
    rows.batch(0)  # `Packed`: input_ids, targets, positions, cu_seqlens

Examples are not padded. A row is a group of examples with at most `sequence_length` tokens in all;
a batch joins `batch_size` rows to one sequence of tokens. A token attends only to tokens of its own
example. An example of preferences is a pair of texts: the prompt with the preferred answer, and the
prompt again with the rejected answer. There, a token attends only to tokens of its own text.
"""

from trainable_candle.data.chats.dataset import TextDataset, TextOptions, has_pairs, load_texts
from trainable_candle.data.chats.labels import Pair, Tokens, tokens_of, unknown_token
from trainable_candle.data.chats.packing import IGNORED, Packed, PackedRows, best_fit, in_order

__all__ = [
    "IGNORED",
    "Packed",
    "PackedRows",
    "Pair",
    "TextDataset",
    "TextOptions",
    "Tokens",
    "best_fit",
    "has_pairs",
    "in_order",
    "load_texts",
    "tokens_of",
    "unknown_token",
]
