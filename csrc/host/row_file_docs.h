// The docstrings of RowFile.
#pragma once

namespace rec_kernels::host::row_file_docs {

constexpr char kClass[] =
    R"(Embedding tables in a file that may be larger than memory.

``window`` is a range of virtual memory as large as the tables. Rows are read and written at their addresses in it, but
only if their blocks are loaded: ``load`` reads the blocks of rows and pins them until the next ``load``. ``flush``
makes changes durable; a crash at any time leaves the state of one flush or the next.

A block is ``block_bytes`` of the window and of the file. At most ``memory_budget`` bytes of blocks are resident. To
make room, the least recently used blocks are evicted; dirty ones are first written to ``<path>.log``. The two files
belong together: the file without its log has the previous generation, or, if the log was being applied, none.

The object is thread-safe: calls are serialized, and the blocks of the last ``load`` are pinned. Only one object on the
machine can open a file at a time. A forked child cannot use the object (RuntimeError), and the file may stay locked
while the child lives if this process is killed.

An OSError has the errno and the path. The object stays usable: no data in memory is lost, and the failed call can be
retried. ``errno.EBADMSG`` means that a checksum does not match. After ``close``, every method except ``stats`` and
``close`` raises ValueError. See docs/row_file.md.)";

constexpr char kCreate[] =
    R"(Creates a file that reads as zeros. It is sparse: it takes only the disk space of the flushed blocks.

Args:
    path: path of the file, which must not exist.
    num_bytes: total size of the tables, 0 to 2**46.
    layout: text that describes the bytes; ``open`` requires the same text.
    memory_budget: bytes, at least one block.
    block_bytes: a power of two, from the page size to 2**26; None: 4096, or the page size if that is larger.
    threads: I/O threads, 1 to 256; None: twice the number of processors, at most 8.

Raises:
    FileExistsError: the path exists.
    OSError: the file cannot be written; it is removed.
    ValueError: an argument is out of range, or ``<path>.log`` exists and is not the log of a row file.)";

constexpr char kOpen[] =
    R"(Opens a file in the state of its last flush.

Args:
    path: path of the file.
    layout: the text given to ``create``.
    memory_budget: bytes, at least one block.
    threads: as in ``create``.
    generation: the generation to open. After ``flush(apply=False)`` there are two: the last one (None), which stays in
        the log, and the previous one; opening the previous one discards the last. Otherwise there is only one.

Raises:
    FileNotFoundError: the file does not exist.
    BlockingIOError: the file is already open.
    ValueError: it is not a row file, has another version, layout or generation, an argument is out of range, or
        ``<path>.log`` is not its log.
    OSError: the file cannot be read, is truncated or damaged (``errno.EBADMSG``).)";

constexpr char kWindow[] =
    R"(The bytes as a writable numpy array, uint8 [num_bytes], without a copy.

Read and write only loaded bytes: others read as zeros, and writes to them are lost and take memory. The array may
outlive the object; after ``close`` it reads as zeros and is no longer connected to the file.)";

constexpr char kLoad[] =
    R"(Loads all blocks of the byte ranges and pins them until the next ``load`` or ``unpin``.

Blocks that a ``prefetch`` has read, or is reading, are not read again.

Args:
    starts: int64 [n], byte offsets in the window, in any order; may repeat.
    sizes: int64 [n], bytes of each range, or one integer for all ranges.
    write: whether the bytes will be changed before the next ``load``: marks their blocks dirty.

Raises:
    IndexError: a range is outside the window.
    ValueError, TypeError: arguments have a wrong shape, value or dtype.
    MemoryError: these blocks and the prefetched ones exceed ``memory_budget``.
    OSError: a block cannot be read or is damaged, or the disk is full when a dirty block is evicted. If reading had
        started, nothing is pinned afterwards. The other errors change nothing.)";

constexpr char kPrefetch[] =
    R"(Starts reading all blocks of the ranges for a later ``load``, and returns.

The blocks stay resident until they are loaded or ``cancel_prefetch`` is called. Read errors are raised by that
``load``. If dirty blocks must be evicted while a ``flush(apply=False)`` is not applied, this applies it first.

Args and errors are those of ``load``.)";

constexpr char kMarkDirty[] =
    R"(Marks ranges that were changed, or will be before the next ``load``, as ``load(write=True)`` does.

Args:
    starts, sizes: as in ``load``.

Raises:
    ValueError: a block is not loaded; none is marked.
    IndexError, TypeError: as in ``load``.)";

constexpr char kUnpin[] = "Unpins the blocks of the last ``load``, as the next ``load`` does.";

constexpr char kCancelPrefetch[] =
    "Releases all prefetched blocks that were not loaded; waits for those that are being read.";

constexpr char kFlush[] =
    R"(Makes all changes durable as the next generation, and returns its number.

Do not write to the window during the call. Afterwards all blocks are clean, and after an OSError some may be: later
writes to blocks that are still pinned need ``mark_dirty`` or another ``load(write=True)``.

Args:
    apply: False keeps this generation in the log and the previous one in the file, so that ``open`` can choose, until
        ``apply``, the next ``flush``, or a ``load`` or ``prefetch`` that must write dirty blocks to the log.

Raises:
    OSError: the disk is full or fails. No change is lost. If ``generation`` has advanced, the flush itself succeeded,
        and only applying the log must be repeated, by ``apply`` or the next flush.)";

constexpr char kApply[] =
    R"(Applies the log of ``flush(apply=False)`` to the file, if there is one.

Until the next write, the file is complete without its log.

Raises:
    OSError: the disk is full or fails. The generation is safe in the log; retry.)";

constexpr char kClose[] =
    R"(Stops the threads, frees the memory and closes the file. Discards changes that were not flushed.

Idempotent; the end of a ``with`` block calls it.)";

constexpr char kStats[] =
    R"(Counters since the file was opened, and current sizes, as a dict of ints.

``loads``; ``hits``, distinct blocks of loads that were resident or being read; ``prefetched``, blocks that prefetches
started to read; ``blocks_read``, ``bytes_read``; ``blocks_written``, ``bytes_written``, to the log; ``resident_bytes``,
at most ``memory_budget``; ``dirty_bytes``, the part of them that was changed and is in no file yet; ``log_bytes``; ``bookkeeping_bytes``, memory
besides the blocks: 5 bytes per block of the file, 16 per block that fits the budget, 8 to 16 more per resident block,
32 to 64 per block in the log or being written to it.)";

constexpr char kGeneration[] = "Number of the last flush, 0 for a new file; does not count unflushed changes.";

constexpr char kIdentity[] = "Random number below 2**64, drawn by ``create``; copies of the file share it.";

}  // namespace rec_kernels::host::row_file_docs
