"""Messages about ids and offsets that lookups refuse, in the words of the caller and with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: The ops' words for an id, at the beginning of a message; for a feature; for one of ``torch.nn.EmbeddingBag``'s bags.
_ID = re.compile(r"(?:values|input)\[(\d+)\] = ")
_NEGATIVE = re.compile(r"values\[\d+\] = -")
_FEATURE = re.compile(r"\(feature (\d+), ")
_BAG = re.compile(r"\(feature (?:0|'input'), (bag \d+)\)")
_ADVICE = (
    "; a negative id that is padding is left out by rk.KeyedJaggedTensor.from_dict(..., padding_value=), or give an id "
    "of the table that is its config's padding_idx; signed 64-bit hashes have rows in a table with num_embeddings=None "
    "and compression=rk.Hash(buckets)"
)


def advice_on(value: int) -> str:
    """The end of a message about an id that no table has: advice, if it is negative."""
    return _ADVICE if value < 0 else ""


def explained(text: str, features: Sequence[str]) -> str:
    """The message of a lookup in a collection: with its feature's name, and once with advice on a negative id."""
    text = _FEATURE.sub(lambda found: f"(feature {features[int(found[1])]!r}, ", text, count=1)
    return text + _ADVICE if _NEGATIVE.match(text) and _ADVICE not in text else text


def explain(error: Exception, features: Sequence[str]) -> None:
    """Has an error of the ops say what ``explained`` does; ``features`` are the names of the collection's."""
    if error.args:
        error.args = (explained(str(error.args[0]), features), *error.args[1:])


def explain_input(error: Exception, shape: Sequence[int], *, pools: bool = True) -> None:
    """Has an error of a lookup speak of ``torch.nn.EmbeddingBag``'s arguments, or without ``pools`` of Embedding's.

    Args:
        shape: of ``input``, of which the op was given the elements, one after the other.
    """
    if not error.args:
        return
    text = str(error.args[0]).removesuffix(_ADVICE).replace("ids of this feature must", "ids must")
    text = _BAG.sub(r"(\1)", text, count=1).replace("the number of values", "the number of ids")
    if found := _ID.match(text):
        place, at = [], int(found[1])
        for size in reversed(shape):
            at, index = divmod(at, max(size, 1))
            place.append(str(index))
        name = f"input[{', '.join(reversed(place))}]" if place else "input"
        rest = text[found.end() :]
        text = f"{name} = {rest if pools else re.sub(r' [(]bag [0-9]+[)]', '', rest, count=1)}"
    error.args = (text, *error.args[1:])
