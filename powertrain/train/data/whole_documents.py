"""Samples of whole documents in GPT-NeoX's order: one each (unpacked), or as many as fit (until_overflow).

A sample ends with the first token of the document after it, and is then padded, or cut, to the run's length. Documents
without a label that counts are left out, with allow_chopped false also those that are longer than a sample.

Source: EleutherAI/gpt-neox, megatron/data/gpt2_dataset.py, as facts. It differs where that would read documents of
another part of a split, or never end.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from powertrain.train.data.samples import Integers, SampleOrder

Packing = Literal["unpacked", "until_overflow"]


def whole_document_order(
    sizes: Integers,
    documents: range,
    *,
    packing: Packing,
    seq_length: int,
    num_samples: int,
    seed: int,
    allow_chopped: bool = True,
    has_labels: Callable[[int], bool] = lambda document: True,
) -> SampleOrder:
    """The order of `num_samples` samples of whole documents.

    sizes        of all documents;  has_labels: whether one of a document's first labels counts
    Raises ValueError if no document may be taken.
    """

    def may_be_taken(document: int) -> bool:
        return (allow_chopped or sizes[document] <= seq_length + 1) and has_labels(document)

    random = np.random.RandomState(seed)
    # drawn before the documents are: the generator's order of draws is part of GPT-NeoX's order
    shuffle = np.arange(num_samples)
    random.shuffle(shuffle)
    taken = {document for document in documents if may_be_taken(document)}
    if not taken:
        raise ValueError(f"data.packing {packing}: a document must fit and have labels, got none of {len(documents)}")
    if packing == "unpacked":
        cycle = [document for document in documents if document in taken]
        # resize repeats the cycle; one more, because a sample ends with the next document's first token
        laid = np.resize(np.array(cycle, dtype=np.int32), num_samples + 1)
        firsts = np.arange(num_samples + 1)
    else:
        laid, firsts = _until_overflow(sizes, documents, taken, seq_length + 1, num_samples, random)
        # there the last one runs out of the list of documents, and the sample whose number it is stands in for it
        shuffle[shuffle == num_samples - 1] = shuffle[num_samples - 1]
    # every sample begins at the first token of a document, hence the zeros
    return SampleOrder(laid, np.stack([firsts, np.zeros_like(firsts)], 1), shuffle)


def _until_overflow(
    sizes: Integers, documents: range, taken: set[int], most: int, num_samples: int, random: np.random.RandomState
) -> tuple[Integers, Integers]:
    """(documents laid end to end, where each sample begins among them and where the last one ends)."""
    order = np.arange(len(documents))
    random.shuffle(order)
    laid: list[int] = []
    firsts: list[int] = []
    length, position = 0, 0
    while len(firsts) < num_samples:
        document = documents[order[position]]
        if document in taken:
            size = int(sizes[document])
            # length 0: the first document, which begins a sample whatever its size
            if length == 0 or length + size > most:
                firsts.append(len(laid))
                length = 0
            length += size
            laid.append(document)
        position += 1
        if position == len(order):
            position = 0
            random.shuffle(order)
    # one more, whose first token ends the last sample
    return np.array([*laid, laid[0]], dtype=np.int32), np.array([*firsts, len(laid)])
