"""A training step that runs out of memory raises without partial changes, and succeeds with more memory."""

from __future__ import annotations

import sys

import pytest
from process_cases import run_script
from tiers import full

import rec_kernels as rk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the address space is measured by /proc")

#: Repeats the step with growing limits of the address space, so that each of its allocations fails once.
SWEEP = """
import resource, sys
import torch
import rec_kernels as rk
from process_cases import address_space, batch, collection, limit_address_space, state, step
from rec_kernels.nn.tables import row_cache as caches
from rec_kernels.testing import same_bits

optimizer, cached, threads = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
torch.set_num_threads(threads)
made = [collection(getattr(rk, optimizer)(lr=0.01), rk.RowCache(0.1) if cached else None) for _ in range(2)]
short, enough = made
for tables in made:
    step(tables, batch(400))  # code, threads and their stacks are there
large = batch(6000, seed=1)

def differing(a, b):
    assert list(a) == list(b)
    return [name for name in a if not same_bits(a[name], b[name])]

# A row cache takes the batch's rows in before it is looked up: done is done, by each op.
call, insertions = caches.call_uncounted, 0
def call_recorded(op, *arguments, **named):
    global before, insertions
    result = call(op, *arguments, **named)
    if op != "row_cache_insert_.layout":
        return result
    now = resource.getrlimit(resource.RLIMIT_AS)[0]
    limit_address_space(None)
    before, insertions = state(short), insertions + 1
    limit_address_space(now)
    return result
if cached:
    caches.call_uncounted = call_recorded

failed, messages, before, base = 0, set(), state(short), address_space()
for extra in range(0, 400):
    limit_address_space(base + (extra << 17))
    try:
        found = step(short, large)
    except (RuntimeError, MemoryError) as error:
        failed += 1
        messages.add(f"{type(error).__name__}: {error}"[:60])
    else:
        break
    finally:
        limit_address_space(None)
    assert not differing(state(short), before), (extra, insertions, messages, differing(state(short), before))
else:
    sys.exit("the step never found memory enough")
if cached:
    caches.call_uncounted = call
    assert state(short)["row_cache.clock"] == 1 + insertions
else:
    assert same_bits(found, step(enough, large))
    assert same_bits(step(short, batch(400, seed=2)), step(enough, batch(400, seed=2)))
    assert not differing(state(short), state(enough))
print(failed, *sorted(messages), sep="\\n")
"""

#: Repeats the update of long bags, from no free memory on, so that its scratch allocation fails. Products of rows are
#: updated in turns, of which a later one may need more memory.
UPDATE = """
import sys
import torch
import rec_kernels as rk
from process_cases import KEYS, ROWS, address_space, collection, limit_address_space, state
from rec_kernels.ops import version_counters
from rec_kernels.testing import same_bits

optimizer, threads, products = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
torch.set_num_threads(threads)

def made():
    chosen = getattr(rk, optimizer)(lr=0.01)
    if not products:
        return collection(chosen)
    torch.manual_seed(0)
    parts, dims = rk.QuotientRemainder(50, combine="mult"), zip(KEYS, (8, 16, 64))
    configs = [rk.EmbeddingBagConfig(ROWS, dim, name=k, feature_names=[k], compression=parts) for k, dim in dims]
    return rk.EmbeddingBagCollection(configs, optimizer=chosen)

tables, enough = made(), made()
ids, per_bag = torch.randint(ROWS, (len(KEYS) * 300_000,)), torch.arange(len(KEYS) + 1) * 300_000
long_bags = rk.KeyedJaggedTensor(KEYS, ids, offsets=per_bag)
short = rk.KeyedJaggedTensor(KEYS, ids[: len(KEYS)], offsets=torch.arange(len(KEYS) + 1))
update, extra = version_counters.call_uncounted, None

def update_with_little(*arguments, **named):
    if extra is not None:
        limit_address_space(address_space() + extra)
    try:
        return update(*arguments, **named)
    finally:
        limit_address_space(None)

version_counters.call_uncounted = update_with_little

def train(tables, batch):
    tables(batch).values().square().sum().backward()

for each in (tables, enough):
    train(each, short)
before, failed, messages = state(tables), 0, set()
for extra in range(0, 200 << 20, 1 << 19):
    try:
        train(tables, long_bags)
    except (RuntimeError, MemoryError) as error:
        failed += 1
        messages.add(f"{type(error).__name__}: {error}"[:60])
        now = state(tables)
        assert all(same_bits(now[name], before[name]) for name in before), (extra, messages)
    else:
        break
else:
    sys.exit("the update never found memory enough")
extra = None
train(enough, long_bags)
assert all(map(same_bits, state(tables).values(), state(enough).values()))
print(failed, *sorted(messages), sep="\\n")
"""


@pytest.mark.parametrize(
    ("optimizer", "cached", "threads"),
    [("RowwiseAdagrad", True, 2), *full(("SGD", False, 1), ("Adam", False, 2), ("LAMB", False, 1), ("Adam", True, 1))],
)
def test_a_step_is_done_or_not(optimizer: str, cached: bool, threads: int) -> None:
    """Tables, state, cache and counters are as before the step, or as after it."""
    done = run_script(SWEEP, optimizer, cached, threads)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    failed, *messages = done.stdout.splitlines()
    assert int(failed) >= 5
    assert messages


@pytest.mark.parametrize(
    ("optimizer", "threads", "products"),
    [("Adam", 2, False), ("SGD", 1, True), *full(("SGD", 1, False), ("LAMB", 1, False), ("Adam", 2, True))],
)
def test_an_update_is_done_or_not(optimizer: str, threads: int, products: bool) -> None:
    """An update without enough scratch memory raises an error that says so, and changes nothing."""
    done = run_script(UPDATE, optimizer, threads, products)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    failed, *messages = done.stdout.splitlines()
    assert int(failed) >= 3
    assert any("of scratch memory" in message for message in messages), messages


def test_tables_without_room() -> None:
    """The error has the bytes of all tables and of the largest, unlike torch's."""
    tables = [rk.EmbeddingBagConfig(rows, 64, name=f"t{rows}", feature_names=[f"f{rows}"]) for rows in (10, 10**12)]
    with pytest.raises(RuntimeError, match=r"2 tables of 256,000,000,002,560 bytes, of which 't1000000000000' has 256"):
        rk.EmbeddingBagCollection(tables)
