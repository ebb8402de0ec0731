"""The identity of a token does not depend on how tokens are batched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensortap as tap
from tensortap.core.errors import NotFound
from tensortap.rooms.align.contexts import identities, read_tokens

SEQUENCES = [[5, 6, 7], [5, 6, 8, 9, 1], [5, 6, 7]]  # a repeated one


def caught(folder, batches):
    """Catch one number per token, which names it; return what is read."""
    run = tap.init(folder)
    for tokens, described in batches:
        tap.catch(np.asarray(tokens, np.float32), "value", tokens=tokens, **described)
    tap.finish()
    return read_tokens(run)


def contexts(read):
    """The contexts and identities of all rows."""
    rows = read.names["value"]
    table = read.table
    assert (rows.value == table.token[rows.entry]).all()
    return {(tuple(table.context(entry, 99)), int(table.identity[entry])) for entry in rows.entry}


def padded(side):
    width = max(map(len, SEQUENCES))
    ids, mask = np.zeros((2, len(SEQUENCES), width), np.int64)
    for row, each in enumerate(SEQUENCES):
        place = slice(0, len(each)) if side == "right" else slice(width - len(each), width)
        ids[row, place], mask[row, place] = each, 1
    return ids, {"mask": torch.from_numpy(mask).bool() if side == "left" else mask}


FLAT = list(itertools.chain(*SEQUENCES))
ENDS = np.cumsum([0, *map(len, SEQUENCES)])
LAYOUTS = {
    "one by one": [(np.array(each), {}) for each in SEQUENCES],
    "right": [padded("right")],
    "left": [padded("left")],
    "cu_seqlens": [(torch.tensor(FLAT), {"cu_seqlens": torch.tensor(ENDS, dtype=torch.int32)})],
    "positions": [([FLAT], {"positions": [[n for each in SEQUENCES for n in range(len(each))]]})],
    "numbered": [([FLAT], {"mask": [[i + 1 for i, s in enumerate(SEQUENCES) for _ in s]]})],
    "decoded": [
        ([[each[i]] for _, each in alive], {"sequence": [name for name, _ in alive]})
        for i in range(5)
        if (alive := [(str(n), each) for n, each in enumerate(SEQUENCES) if i < len(each)])
    ],
    "chunks": [
        (part, {"sequence": n})
        for n, each in enumerate(SEQUENCES) for part in (each[:2], each[2:])
    ],
    "packed chunks": [
        (SEQUENCES[1][:3] + SEQUENCES[0], {"cu_seqlens": [0, 3, 6], "sequence": ["b", "a"]}),
        (SEQUENCES[1][3:], {"sequence": "b"}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_identities(tmp_path, layout):
    expected = contexts(caught(tmp_path / "a", LAYOUTS["one by one"]))
    assert len(expected) == 6  # different contexts
    assert contexts(caught(tmp_path / "b", LAYOUTS[layout])) == expected


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8))
def test_equal_contexts_and_no_others_have_equal_identities(sequences):
    sizes = [len(each) for each in sequences]
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    flat = np.concatenate(sequences).astype(np.int64)
    found = identities(flat, np.arange(len(flat)) - starts, starts)
    texts = [tuple(each[: i + 1]) for each in sequences for i in range(len(each))]
    assert len(set(texts)) == len(set(zip(texts, found.tolist(), strict=True)))
    assert len(set(texts)) == len(set(found.tolist()))


def test_values_about_the_last_tokens(tmp_path):
    ids = np.arange(20).reshape(2, 10)
    run = tap.init(tmp_path)
    tap.catch(np.zeros((2, 3)), "answers", tokens=ids)
    tap.catch(np.zeros((20, 4)), "flat", tokens=ids)
    tap.finish()
    read = read_tokens(run)
    tokens = {name: read.table.token[rows.entry].tolist() for name, rows in read.names.items()}
    assert tokens == {"answers": [7, 8, 9, 17, 18, 19], "flat": list(range(20))}
    assert read.names["flat"].value.shape == (20, 4)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_tokens_of_a_batch_are_recorded_once(tmp_path, make):
    ids = make([[1, 2, 3]])
    run = tap.init(tmp_path)
    for name in "abc":
        tap.catch(np.zeros((1, 3)), name, tokens=ids)
    with torch.inference_mode():  # such tensors count no changes
        own = torch.tensor([[4, 5, 6]])
        for name in "ab":
            tap.catch(np.zeros((1, 3)), name, tokens=own)
            own += 1
    ids += 1  # in place, as engines do
    tap.catch(np.zeros((1, 3)), "a", tokens=ids)
    tap.finish()
    batches = [np.asarray(batch["tokens"]).tolist() for batch in read_tokens(run).batches]
    assert batches == [[[1, 2, 3]], [[4, 5, 6]], [[5, 6, 7]], [[2, 3, 4]]]


WRONG = [
    ({"tokens": "text"}, "tokens must be an array of integers, got str"),
    ({"tokens": np.zeros(3)}, "tokens must be integers of one or two dimensions, got float64"),
    ({"tokens": [[1, 2], [3]]}, "tokens must be ids of equal rows"),
    ({"tokens": [[1, 2], [3, 4]]}, "numpy.ndarray of shape (2, 4) has no row per token of (2, 2)"),
    ({"tokens": np.ones((2, 4), int), "mask": np.ones((2, 3), int)}, "mask must have the shape"),
    ({"tokens": np.ones((2, 4), int), "cu_seqlens": [0, 8]}, "cu_seqlens must be offsets into"),
    ({"tokens": np.ones((2, 4), int), "sequence": 1.5}, "sequence must be a name, or a list"),
    ({"mask": np.ones((2, 4))}, "describe tokens: pass tokens=ids"),
    ({"tokens": np.ones((2, 4), int), "server": "127.0.0.1:9"}, "tokens and server"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_wrong_arguments_are_named_and_training_goes_on(tmp_path, caplog, options, words):
    tap.init(tmp_path)
    tap.catch(np.zeros((2, 4)), words, **options)  # an error is logged once per name
    tap.finish()
    assert words in caplog.text


def test_a_run_without_tokens(tmp_path):
    run = tap.init(tmp_path)
    tap.catch(1.0, "loss")
    tap.finish()
    with pytest.raises(NotFound, match="has no tokens"):
        tap.align(run, run)
