"""Messages about ids that no table has, with what to write instead."""

from __future__ import annotations

import re

#: The ops' words for a negative id, at the beginning of a message.
_NEGATIVE = re.compile(r"values\[\d+\] = -")
_ADVICE = (
    "; a negative id that is padding is left out by rk.KeyedJaggedTensor.from_dict(..., padding_value=), or give an id "
    "of the table that is its config's padding_idx; signed 64-bit hashes have rows in a table with num_embeddings=None "
    "and compression=rk.Hash(buckets)"
)


def advice_on(value: int) -> str:
    """The end of a message about an id that no table has: advice, if it is negative."""
    return _ADVICE if value < 0 else ""


def advised(text: str) -> str:
    """A lookup's message, with advice, once, if it is about a negative id."""
    return text + _ADVICE if _NEGATIVE.match(text) and _ADVICE not in text else text


def advise(error: IndexError) -> None:
    """Adds advice to an op's error, if it is about a negative id."""
    if error.args:
        error.args = (advised(str(error.args[0])), *error.args[1:])
