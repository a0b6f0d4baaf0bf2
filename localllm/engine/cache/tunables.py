"""The tunables of the prefix cache: unit, meaning, and how each value was found.

Other modules read them as `tunables.NAME` at the time of use, so a test can set one.
"""

# --- pieces of KV ---------------------------------------------------------------------------------

# tokens. Copying fewer tokens back is no faster than computing them.
MIN_TOKENS = 16
# tokens per export. A block's own overhead is negligible at this size, and the export takes a
# fraction of a step.
PIECE_TOKENS = 512
# runs of cells per export from device memory. Each run is copied separately, twice per layer.
MAX_RUNS = 64
# share of the cells. On a device, sequences are exported while requests run if no more cells than
# this are free.
LOW_CELLS_SHARE = 0.25
# seconds. Data held only in memory, or only on disk, is protected for this long after its last use.
# It is not evicted for a sequence that could stay in the context. Agents and people usually come
# back within the hour. Recomputing a prompt costs more than the cells that the sequence occupies.
STALE_S = 3600.0
# share of a step. On a device, idle sequences are evicted while requests run if attention over
# their tokens costs more than this.
IDLE_STEP_SHARE = 0.03
# seconds. On shutdown the engine waits this long for the writer to free memory for sequences that
# are not exported yet.
CLOSE_S = 10.0

# --- states of models that can't rewind -----------------------------------------------------------

# states. This many of a sequence's newest states are kept, however close together they are: before
# its last two turns and at its end.
NEWEST_STATES = 3
# tokens. States closer together than this save little.
STATE_INTERVAL_TOKENS = 512
# share of the cache's memory. The states of one sequence take no more than this.
STATE_SHARE = 0.25
# A state may cost as much memory as the KV of this many times the tokens to the next state.
STATE_COST = 4.0
# seconds. If copying a state out of device memory takes longer than this, the copies are limited.
# Such copies may take at most EXPORT_SHARE of a prompt's time. Example: 0.6 s on a Strix Halo
# under Vulkan, because of one fence per tensor (github.com/ggml-org/llama.cpp/issues/28118).
SLOW_EXPORT_S = 0.05
EXPORT_SHARE = 0.1
# tokens. Recomputing this many tokens costs more than copying a state.
MIN_STATE_GAIN_TOKENS = 64
# tokens. If a prompt ends in the middle of a turn, text that follows may change this many of its
# last tokens.
TAIL_TOKENS = 4
# tokens. Recomputing this few tokens costs less than storing one more state.
MIN_GAP_TOKENS = 16
# tokens. A checkpoint before the end of the prompt needs one more step. That is 40 % of a turn of
# 20 tokens (gemma-3-270m).
MIN_STEP_GAIN_TOKENS = 32
# tokens. Saving this many tokens justifies a state, and its step, at a likely branch of the
# prompt: its last paragraph.
MIN_PARAGRAPH_GAIN_TOKENS = 256
# tokens from the end. Checkpoints of a prompt without a likely branch. A branch there
# recomputes at most about four times the tokens after the branch, at the cost of two more steps.
POINTS_FROM_THE_END = (36, 140)

# --- idle sequences before a prompt ---------------------------------------------------------------

# tokens. If a cell is evicted, no token of the prompt needs to attend to it, but the cell must be
# copied first. The break-even is 60 to 100 tokens for SmolLM2 (three heads each for K and V), and
# fewer with more heads.
EXPORT_FIRST_TOKENS = 128
# share. Exporting may take this part of the time that the prompt itself takes, if that is known.
EXPORT_FIRST_SHARE = 0.1

# --- writing to disk ------------------------------------------------------------------------------

# seconds without new work before the writer starts. Writing takes a core away from computing (45
# MB: 5 % of a warm turn on two cores), so it waits for a pause.
WRITE_PAUSE_S = 0.05
# seconds. The writer waits no longer than this for a pause.
WRITE_PATIENCE_S = 3.0
# bytes. The writer does not wait for a pause if more than this is queued.
WRITE_WAITING_BYTES = 128 * 2**20
# bytes. Data is hashed and written, or read, in pieces of this size: half a millisecond of work.
FILE_PIECE_BYTES = 2**19
# While steps run, the writer rests after each piece: WRITE_RESTS times as long as the piece took,
# but at most WRITE_REST_S seconds. One busy thread more than there are processors delays every
# thread at a barrier. Example: 70 MB in one go made a step take 250 ms, 20 times as long as the
# others.
WRITE_RESTS = 20.0
WRITE_REST_S = 0.02
# Limits for the wait until evicted data is written, if a request needs its cells. The wait
# takes at most this share of the time to recompute the tokens, and at most WRITE_WAIT_S seconds.
WRITE_WAIT_SHARE = 0.25
WRITE_WAIT_S = 3.0
# bytes. This much free space is left to other users of the disk.
DISK_FREE_BYTES = 2 * 10**9
# Several servers may use one folder. After this many seconds, files that others wrote are looked
# for.
FOLDER_SCAN_S = 5.0
# A running server marks its folder as in use at least this often, in seconds. A folder of another
# layout is removed if it was not marked for `FOLDER_UNUSED_S`.
FOLDER_MARK_S = 3600.0
FOLDER_UNUSED_S = 24 * 3600.0
# seconds. An incomplete file that another machine has not written to for so long is removed.
PART_UNUSED_S = 3600.0
# nanoseconds per token of depth. This is coarser than the time stamps of current file systems
# (NTFS: 100 ns).
FILE_DEPTH_NS = 1000

# --- reading from disk ----------------------------------------------------------------------------

# Weight that earlier measurements keep after each piece. The average covers about 20 pieces, 10
# MB.
READ_SPEED_DECAY = 0.95
# threads that read one file if a device computes. One thread checks 2.1 GB/s and copies 1.3 GB/s
# from the system's file cache. An H200 computes the KV of an 8B model at that rate. A fast disk
# reads 7 GB/s.
READERS_WITH_DEVICE_KV = 8
# bytes that are read ahead: one or two large blocks.
READ_AHEAD_BYTES = 128 * 2**20
# seconds. The longest rest after a piece. It is longer than copying and hashing a piece take. While
# the thread waits for a slow disk, it displaces no other thread.
READ_REST_S = 0.001
# seconds. Reading may take this long as long as the cost of computing is unknown. If a file gives
# no data for longer than this, the engine stops waiting for it.
READ_TIMEOUT_S = 10.0
# seconds. Reading is expected to take as long as measured, unless the current read has given no
# data for longer than this.
READ_STALLED_S = 0.05
# seconds. On shutdown a reader in the middle of a read is waited for this long. After that it runs
# until the process ends.
READ_CLOSE_S = 1.0

# --- prefixes that were known before --------------------------------------------------------------

# tokens. A prompt is remembered by the hash of each of its prefixes whose length is a multiple of
# this.
HISTORY_STEP_TOKENS = 64
# prefixes. They cover 4 million tokens in about 6 MB.
HISTORY_PREFIXES = 65_536
