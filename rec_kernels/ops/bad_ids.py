"""Rewrites error messages about invalid ids and offsets in terms of the caller's arguments, with advice."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Patterns in the ops' messages: an id, at the start; a feature; a bag of ``torch.nn.EmbeddingBag``.
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
    """Returns advice to append to a message about an id out of range; empty unless the id is negative."""
    return _ADVICE if value < 0 else ""


def explained(text: str, features: Sequence[str]) -> str:
    """Names the feature in the message of a collection's lookup, and appends advice once if the id is negative."""
    text = _FEATURE.sub(lambda found: f"(feature {features[int(found[1])]!r}, ", text, count=1)
    return text + _ADVICE if _NEGATIVE.match(text) and _ADVICE not in text else text


def explain(error: Exception, features: Sequence[str]) -> None:
    """Rewrites an op's error by ``explained``; ``features`` are the collection's feature names."""
    if error.args:
        error.args = (explained(str(error.args[0]), features), *error.args[1:])


def explain_input(error: Exception, shape: Sequence[int], *, pools: bool = True) -> None:
    """Rewrites a lookup's error in terms of the arguments of ``torch.nn.EmbeddingBag``.

    Args:
        shape: shape of ``input``, which the op received flattened.
        pools: False for ``torch.nn.Embedding``, which has no bags.
    """
    if not error.args:
        return
    text = str(error.args[0]).removesuffix(_ADVICE).replace("ids of this feature must", "ids must")
    text = _BAG.sub(r"(\1)", text, count=1).replace("the number of values", "the number of ids")
    if found := _ID.match(text):
        indices, at = [], int(found[1])
        for size in reversed(shape):
            at, index = divmod(at, max(size, 1))
            indices.append(str(index))
        name = f"input[{', '.join(reversed(indices))}]" if indices else "input"
        rest = text[found.end() :]
        text = f"{name} = {rest if pools else re.sub(r' [(]bag [0-9]+[)]', '', rest, count=1)}"
    error.args = (text, *error.args[1:])
