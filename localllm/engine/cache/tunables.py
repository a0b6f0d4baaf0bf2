"""The prefix cache's tunables, in one table: unit, meaning, and how each was found. Read where they
are used, as `tunables.NAME`, so that a test can set one."""

# --- pieces of KV ---------------------------------------------------------------------------------

# tokens; copying fewer than this back is no faster than computing them
MIN_TOKENS = 16
# tokens; one export. A block's own overhead vanishes, and exporting it is a fraction of a step
PIECE_TOKENS = 512
# runs of cells; one export from a device's memory: each run is copied by itself, twice a layer
MOST_RUNS = 64
# share of the cells; on a device sequences are exported beside running requests once no more than
# this is free
FEW_CELLS_SHARE = 0.25
# seconds; what is only in memory, or only on disk, and was used since then makes no way for a
# sequence that could stay in the context: agents and people come back within the hour, and reading
# a prompt again costs more than the cells it keeps busy
FORGOTTEN_S = 3600.0
# share of a step; on a device idle sequences leave beside running requests once attention over them
# costs more than this
IDLE_STEP_SHARE = 0.03
# seconds; closing waits this long for the writer to make room for what is not exported yet
CLOSE_S = 10.0

# --- states, of models that can't rewind ----------------------------------------------------------

# states; so many of a sequence's newest are kept however near they are: before its last two turns,
# and at its end
NEWEST_STATES = 3
# tokens; states nearer to each other than this save little
STATE_INTERVAL_TOKENS = 512
# share of the memory; the states of one sequence take no more
STATE_SHARE = 0.25
# a state may cost as much memory as the KV of so many times the tokens to the next
STATE_COST = 4.0
# seconds; copying a state out of a device's memory that takes longer is worth looking at (a fence
# for each tensor: 0.6 s on a Strix Halo under Vulkan, github.com/ggml-org/llama.cpp/issues/28118),
# and of a prompt's time no more than this share
DEAR_EXPORT_S = 0.05
EXPORT_SHARE = 0.1
# tokens; so many to compute again outweigh the copy of a state
WORTH_A_STATE_TOKENS = 64
# tokens; a prompt that goes on where no turn begins may have its last ones changed by what comes
# behind them
TAIL_TOKENS = 4
# tokens; reading so few again costs less than one more state
NEAR_TOKENS = 16
# tokens; a point ends a step before the prompt does, so costs one step more: 40 % of a turn of 20
# tokens (gemma-3-270m)
WORTH_A_STEP_TOKENS = 32
# tokens; so much read anew is worth a state, and its step, where a prompt may branch: at its last
# paragraph
WORTH_A_PARAGRAPH_TOKENS = 256
# tokens from the end; where nothing says where a prompt may branch: what a branch there reads twice
# is at most about four times what stood behind it, for two more steps
POINTS_FROM_THE_END = (36, 140)

# --- idle sequences before a prompt ---------------------------------------------------------------

# tokens; a cell that leaves saves each token of the prompt its attention over it, and costs its
# copy: 60 to 100 tokens outweigh it (SmolLM2, three heads to each of K and V), fewer with more
# heads to each
EXPORT_FIRST_TOKENS = 128
# share; exporting may take this part of what the prompt itself takes, as far as is known
EXPORT_FIRST_SHARE = 0.1

# --- writing to disk ------------------------------------------------------------------------------

# Writing takes a core from whoever computes (45 MB: 5 % of a warm turn on two cores), so it waits
# for a pause: seconds; nothing new has come for so long
WRITE_PAUSE_S = 0.05
# seconds; but it waits no longer than this
WRITE_PATIENCE_S = 3.0
# bytes; nor with so much in hand
WRITE_WAITING_BYTES = 128 * 2**20
# bytes; hashed and written, or read, at a time: half a millisecond's work
FILE_PIECE_BYTES = 2**19
# Beside steps there is a rest after each piece, so many times as long as it took, but no longer
# than so many seconds: one busy thread more than processors stops all who meet at a barrier (70 MB
# in one go: a step of 250 ms, 20 times the others)
WRITE_RESTS = 20.0
WRITE_REST_S = 0.02
# share; writing what leaves the context is waited for by who needs its cells for this part of the
# time that reading it again would take, and no longer than so many seconds
WRITE_WAIT_SHARE = 0.25
WRITE_WAIT_S = 3.0
# bytes; left to others on a disk that others write to
DISK_FREE_BYTES = 2 * 10**9
# nanoseconds a token of depth; coarser than any current file system's time stamps (NTFS: 100 ns)
FILE_DEPTH_NS = 1000

# --- reading from disk ----------------------------------------------------------------------------

# part that each piece leaves of what was measured before: some 20 pieces, 10 MB
READ_SPEED_DECAY = 0.95
# threads; read a file where a device computes: one checks 2.1 GB/s and copies 1.3 from the system's
# cache, which is what an H200 computes the KV of an 8B at; a fast disk has 7
READERS_BESIDE_DEVICE = 8
# bytes; read before their turn comes: one or two large blocks
READ_AHEAD_BYTES = 128 * 2**20
# seconds; the rest after a piece. Longer than a piece is copied and hashed; waiting for a slow disk
# displaces nobody
READ_REST_S = 0.001
# seconds; as long as it is not known what computing takes, reading may take so long, and a file
# that gives nothing for longer is not waited for
READ_STUCK_S = 10.0
# seconds; reading takes as long as measured, unless a read under way has given nothing for longer
# than this already
READ_LATE_S = 0.05
# seconds; a reader told to end in the middle of a read is waited for this long, then left to the
# process's end
READ_CLOSE_S = 1.0

# --- what was known once --------------------------------------------------------------------------

# tokens; a prompt is remembered by the hash of each of its prefixes that are a multiple of this
# long
HISTORY_STEP_TOKENS = 64
# prefixes; 4 million tokens in some 6 MB
HISTORY_PREFIXES = 65_536
