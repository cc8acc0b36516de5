// The docstrings of RowFile.
#pragma once

namespace rec_kernels::host::row_file_docs {

constexpr char kClass[] =
    R"(The bytes of embedding tables in a file that is larger than the memory allowed for them.

``window`` is a range of virtual memory as large as the tables. Rows in it are read and written at their addresses, but
only those whose blocks were loaded: ``load`` brings in the blocks of rows and holds them until the next ``load``. What
is written reaches the file with ``flush``; a crash at any time leaves the state of one flush or the next.

A block is ``block_bytes`` of the window and of the file. At any time at most ``memory_budget`` bytes of blocks have
memory. For room, blocks are dropped that were not used lately; changed ones are first written to ``<path>.log``. The two
files belong together: the file without its log is of the generation before, or, while it was being written, of none.

Any thread may call; calls take turns, and what is pinned is what the last ``load`` asked for. A file can be open once
at a time, in all processes of the machine. A process that is forked from this one cannot use the object (RuntimeError),
and while it lives the file may stay locked if this process is killed.

Errors: OSError has the errno and the path, and the object can still be used: no data in memory is lost, and whatever
failed may be tried again. ``errno.EBADMSG`` means that bytes of a file are not those that were written (wrong
checksum). After ``close`` every method but ``stats`` and ``close`` raises ValueError. See docs/row_file.md.)";

constexpr char kCreate[] =
    R"(A new file that reads as zeros. It takes no more space on the disk than what is flushed.

Args:
    path: of a file that does not exist.
    num_bytes: of the tables together, 0 to 2**46.
    layout: a text that says what the bytes mean; ``open`` demands the same.
    memory_budget: bytes, at least a block.
    block_bytes: a power of two, from the page size to 2**26; None: 4096, or the page size where that is larger.
    threads: for reading and writing, 1 to 256; None: twice the processors, at most 8.

Raises:
    FileExistsError: there is a file at the path.
    OSError: it cannot be written; nothing is left of it.
    ValueError: a number is out of its range, or ``<path>.log`` is something else than what a row file has left.)";

constexpr char kOpen[] =
    R"(The file that ``create`` made, as the last flush left it.

Args:
    path: of the file.
    layout: that of its creation.
    memory_budget: bytes, at least a block.
    threads: as in ``create``.
    generation: the one to open. After ``flush(apply=False)`` the file has two: the one flushed last, which None takes,
        and which is left in the log as ``flush`` left it; and the one before it, which forgets the last. Otherwise it
        must be the one there is.

Raises:
    FileNotFoundError: there is none.
    BlockingIOError: it is open already.
    ValueError: it is not a row file, has another version, layout or generation, a number is out of its range, or
        ``<path>.log`` is something else.
    OSError: it cannot be read, is cut short or damaged (``errno.EBADMSG``).)";

constexpr char kWindow[] =
    R"(The bytes as a numpy array, uint8 [num_bytes], writable, not a copy.

Only what was loaded may be read or written: elsewhere reading gives zeros, and what is written is lost and takes memory.
The array can be kept; once the file is closed it reads as zeros and has nothing to do with the file any more.)";

constexpr char kLoad[] =
    R"(Brings in all blocks of the ranges of bytes and pins them until the next ``load`` or ``unpin``.

Waits for what a ``prefetch`` is bringing in, and takes over what one has brought in.

Args:
    starts: int64 [n], bytes from the window's beginning, in any order, with repeats.
    sizes: int64 [n], or one number of bytes for all.
    write: the bytes will be changed before the next ``load``: their blocks count as changed from now on.

Raises:
    IndexError: a range is outside of the window.
    ValueError, TypeError: arguments of wrong shape, value or dtype.
    MemoryError: the blocks, and those held for prefetches, are more than ``memory_budget``.
    OSError: a block cannot be read or is damaged, or there is no room on the disk for a changed one that has to go.
        Nothing is pinned after that if the reading began. After the other errors nothing has changed.)";

constexpr char kPrefetch[] =
    R"(Begins to bring in all blocks of the ranges, for a ``load`` to come, and returns.

The blocks are held until a ``load`` asks for them or ``cancel_prefetch``. What cannot be read is left to that ``load``,
which then raises the error. Where a ``flush(apply=False)`` is not applied and changed blocks have to make room, it is
applied first, before this returns.

Args and errors are those of ``load``.)";

constexpr char kMarkDirty[] =
    R"(Says that bytes of ranges were changed, or will be before the next ``load``: what ``load(write=True)`` does at once.

Args:
    starts, sizes: as in ``load``.

Raises:
    ValueError: a block is not loaded; none is marked.
    IndexError, TypeError: as in ``load``.)";

constexpr char kUnpin[] = "Lets go of what the last ``load`` pinned, as the next ``load`` would.";

constexpr char kCancelPrefetch[] =
    "Lets go of all blocks that were prefetched and not loaded since; waits for those being read at the moment.";

constexpr char kFlush[] =
    R"(Makes all changes durable as the next generation, and returns its number.

Nobody may write to the window meanwhile. All blocks count as unchanged after it, and some may after an OSError: what is
written later to blocks that are still pinned needs ``mark_dirty`` or another ``load(write=True)``.

Args:
    apply: False leaves the generation in the log and the one before it in the file, so that ``open`` can choose, until
        ``apply``, the next ``flush``, or a ``load`` or ``prefetch`` that must write changed blocks to the log.

Raises:
    OSError: the disk is full or refuses. No change is lost; ``generation`` says whether the flush itself was done and
        only the copying of the log into the file has to be repeated, by ``apply`` or the next flush.)";

constexpr char kApply[] =
    R"(Copies what ``flush(apply=False)`` left in the log into the file; there may be nothing to do.

Until something is written again, the file is whole without its log.

Raises:
    OSError: the disk is full or refuses. The generation is safe in the log, and this may be tried again.)";

constexpr char kClose[] =
    R"(Ends the threads, gives the memory back and closes the file. Changes that were not flushed are discarded.

May be called again; the end of a ``with`` block calls it.)";

constexpr char kStats[] =
    R"(Counts since the file was opened, and what there is now, as a dict of ints.

``loads``; ``hits``, distinct blocks that loads asked for and that were there or on their way; ``prefetched``, blocks
that prefetches began to read; ``blocks_read``, ``bytes_read``; ``blocks_written``, ``bytes_written``, to the log;
``resident_bytes``, never more than ``memory_budget``; ``dirty_bytes`` of it, changed and in no file; ``log_bytes``;
``bookkeeping_bytes``, memory beside the blocks: 5 bytes for each block of the file, 16 for each that fits the
budget, 8 to 16 more for each that is held, 32 to 64 for each in the log, or on its way there.)";

constexpr char kGeneration[] =
    "The number of the last flush, from 0 for a new file; that of the open file, not of its unflushed changes.";

constexpr char kIdentity[] = "A random number below 2**64 of the file's creation, which its copies share.";

}  // namespace rec_kernels::host::row_file_docs
