"""Which tokens the filters keep, as sets, against the naive twin: odd vocabularies and blocks, ties, numbers at their ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE

from baton.kernels.device import sampling_edge
from baton.kernels.device.sampling import _best_kernel
from baton.kernels.naive.sampling import _edge, _first_largest

ORDINARY = st.one_of(st.floats(-30, 30, width=32), st.integers(-8, 8).map(float))
EXTREME = st.sampled_from([-math.inf, -3e38, 3e38, 1e-40, -0.0, 0.0])
BROKEN = st.sampled_from([math.nan, math.inf, -math.inf])
COLUMNS = {
    "temperature": st.sampled_from([0.0, 1.0, 0.7, 2.0, 1e-3, 1e-38, 1e-42, 40.0, 3e38]),
    "top_p": st.one_of(st.sampled_from([1.0, 0.0, 0.5, 0.999999, 1e-7]), st.floats(0, 1, width=32)),
    "min_p": st.one_of(st.sampled_from([0.0, 1.0, 1e-30, 1e-45]), st.floats(0, 1, width=32)),
}


@st.composite
def cases(draw):
    """logits [n, vocabulary], block, programs, and a setting for each row."""
    vocab_size = draw(st.sampled_from([1, 2, 3, 16, 17, 33, 70]))
    block = draw(st.sampled_from([each for each in (2, 8, 16, 128) if each <= 2 * vocab_size]))
    values = draw(st.lists(st.one_of(ORDINARY, EXTREME), min_size=1, max_size=vocab_size))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        chosen = draw(st.lists(st.sampled_from(values), min_size=vocab_size, max_size=vocab_size))
        if not draw(st.integers(0, 7)):
            chosen[draw(st.integers(0, vocab_size - 1))] = draw(BROKEN)
        rows.append(chosen)
    top_k = st.one_of(st.integers(0, vocab_size + 1), st.just(2**31 - 1))
    settings = {name: [draw(of) for _ in rows] for name, of in COLUMNS.items()}
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    return torch.tensor(rows).to(DEVICE, dtype), block, draw(st.sampled_from([1, 3, 528])), [draw(top_k) for _ in rows], settings


def kept_by_device(logits, block, temperature, top_k, top_p, min_p):
    """Of each row: the token that it has already, or the set of those among which it is drawn."""
    num_rows, vocab_size = logits.shape
    chunks = -(-vocab_size // block)
    best = torch.empty(num_rows, chunks, device=DEVICE)
    ids = torch.empty(num_rows, chunks, dtype=torch.int32, device=DEVICE)
    _best_kernel[(chunks, num_rows)](logits, best, ids, logits.stride(0), vocab_size, block=block, chained=False)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=DEVICE)
    largest, edges = sampling_edge.launch_edge(logits, best, ids, temperature, top_k, top_p, min_p, tokens, block)
    found = []
    for row, edge in enumerate(edges.tolist()):
        distance = (largest[row] - logits[row].float()) / temperature[row]
        found.append(int(tokens[row]) if edge < 0 else set((distance.view(torch.int32) <= edge).nonzero().flatten().tolist()))
    return found


def kept_by_twin(logits, temperature, top_k, top_p, min_p):
    found = []
    for row, wide in enumerate(logits.float()):
        best = wide.max()
        if not best.isfinite():
            found.append(-1)
        elif temperature[row] <= 0:
            found.append(int(_first_largest(wide[None])))
        else:
            scaled = (wide - best) / temperature[row]
            edge = _edge(scaled, scaled.exp(), int(top_k[row]), float(top_p[row]), float(min_p[row]))
            found.append(set((scaled >= edge).nonzero().flatten().tolist()))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: NaN and infinity are meant
@settings(max_examples=12 if DEVICE == "cpu" else 300, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(cases())
def test_the_same_tokens_are_kept(monkeypatch, case):
    logits, block, programs, top_k, columns = case
    monkeypatch.setattr(sampling_edge, "NUM_PROGRAMS", programs)
    floats = {name: torch.tensor(column, dtype=torch.float32, device=DEVICE) for name, column in columns.items()}
    chosen = (floats["temperature"], torch.tensor(top_k, dtype=torch.int32, device=DEVICE), floats["top_p"], floats["min_p"])
    assert kept_by_device(logits, block, *chosen) == kept_by_twin(logits, *chosen)
