// The union of the lists of up to four rows, made by a block in shared memory.
//
// A cell of a hash table has a slot, and beside it which rows list that slot. What comes out is a list
// of the slots and, for each, a mask: bit r says that row r lists it.
//
// The order of the list depends on the set of slots alone, not on the rows' order, the lists' order or
// on which thread came first. The table sees to that: of two slots that want one cell the larger has
// it, and the smaller goes on to the next ("ordered hashing", Amble and Knuth 1974; that inserting at
// the same time leaves the same table is shown by Shun and Blelloch, 2014). One atomicMax does it.
//
// A block may take slots of a range of hashes only: so a split is a range, and splits need no kernel
// before them. If a range names more slots than fit, the caller halves it.
#pragma once

#include "rows.cuh"

constexpr int union_warps = 8, union_threads = union_warps * 32, union_rows = 4;
constexpr int cells = 4096, capacity = 2048, piece = 1024;  // entries that a warp looks at together

// What is needed while the union is made, and what stays.
struct Table {
  int slots[cells];  // -1: empty
  union {
    unsigned char listed[cells][union_rows];  // 1: the row lists the slot
    uint2 counts[cells];                      // how often, 16 bits a row, where that is asked for
  };
  int queue[union_warps][piece];  // a piece of a list for each warp
};

struct Union {
  int slots[capacity];
  unsigned char masks[capacity];
  u64 arrived[union_warps];  // barriers: the piece of a list is there
  int found[union_warps];
  int different;  // slots in the table
  int remaining;  // entries of all rows in the range that no level has had yet; begins as 0
};

// Multiplication by an odd number: no two slots have the same hash.
__device__ __forceinline__ u32 hash_of(int slot) { return u32(slot) * 0x9e3779b1u; }

__device__ __forceinline__ u32 home_of(int slot) {
  const u32 x = hash_of(slot);
  return (x ^ x >> 15) * 0x85ebca6bu >> 20;
}
static_assert(cells == 1 << (32 - 20));

// Hashes first, first + 1, ... first + last.
struct Range {
  u32 first, last;
};

// The list that a warp looks at; several warps share a row's.
struct List {
  const int* entries;  // null: none
  int row;             // of the block, 0 .. 3
  int width, count;    // entries in memory, and those that count
  int first, step;     // this warp's pieces begin at first, first + step, ...
  bool aligned;        // entries and width are multiples of 16 bytes
};

// Start to copy a piece of the list to `queue`.
__device__ __forceinline__ void fetch(int* queue, u64& arrived, const List& list, int first, int lane) {
  const int number = min(piece, list.width - first);
  if (list.aligned) {
    const u32 barrier = shared_address(&arrived), bytes = number * 4;
    if (elect_lane()) {
      expect_bytes(barrier, bytes);
      copy_bulk(shared_address(queue), list.entries + first, bytes, barrier);
    }
  } else {
#pragma unroll 8
    for (int i = lane; i < number; i += 32) queue[i] = list.entries[first + i];
    __syncwarp();
    if (elect_lane()) expect_bytes(shared_address(&arrived), 0);
  }
}

// Which of a lane's entries of a piece name a slot of the cache in the range. A lane has entries
// 128 i + 4 lane + k, k < 4; bit 4 i + k of the result speaks of it.
__device__ __forceinline__ u32 pick(const int* queue, const List& list, int first, u32 slots,
                                    Range range, int lane) {
  const int left = list.count - first - 4 * lane;
  u32 taken = 0;
#pragma unroll
  for (int i = 0; i < piece / 128; ++i) {
    const int4 x = reinterpret_cast<const int4*>(queue)[32 * i + lane];
    const int slot[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (u32(slot[k]) < slots && hash_of(slot[k]) - range.first <= range.last && 128 * i + k < left)
        taken |= 1u << (4 * i + k);
  }
  return taken;
}

// Which rows list the slot more than `level` times.
__device__ __forceinline__ u32 mask_of(uint2 counts, u32 level) {
  return u32((counts.x & 0xffff) > level) | u32(counts.x >> 16 > level) << 1 |
         u32((counts.y & 0xffff) > level) << 2 | u32(counts.y >> 16 > level) << 3;
}

// Note that a row lists the slot of a cell: that it does, or at levels above 0 how often.
__device__ __forceinline__ void list_in(Table& table, int cell, int row, u32 level) {
  if (level == 0)
    table.listed[cell][row] = 1;
  else
    atomicAdd(reinterpret_cast<u32*>(table.counts + cell) + row / 2, 1u << (16 * (row % 2)));
}

struct Made {
  int tokens;  // in the list; -1: they do not fit
  bool more;   // a row lists a slot more than level + 1 times
};

__device__ __forceinline__ void clear(Table& table) {
#pragma unroll 2
  for (int i = threadIdx.x; i < cells / 4; i += union_threads) {
    reinterpret_cast<int4*>(table.slots)[i] = {-1, -1, -1, -1};
    reinterpret_cast<uint4*>(table.counts)[i] = uint4{};
    reinterpret_cast<uint4*>(table.counts)[i + cells / 4] = uint4{};
  }
}

// The slots in the range that a row lists more than `level` times. Level 0 is the union; a slot that is
// listed twice counts twice, so the caller asks for level 1 too where `more` says so.
//
// The table is clear and the first piece of the list under way; `turn` counts the pieces.
__device__ __forceinline__ Made make_union(Union& made, Table& table, const List& list, u32 slots,
                                           Range range, u32 level, u32& turn, int warp, int lane) {
  int* queue = table.queue[warp];
  // All slots first: a slot may move until the last one is in. Then which rows list them. Each lane goes
  // through its own entries.
  bool full = false;
  int entries = 0;
  u32 taken = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int first = list.first; list.entries && first < list.width; first += list.step) {
      if (pass == 0 || list.first + list.step < list.width) {
        if (pass > 0 || first > list.first) {
          fence_before_bulk_copies();
          __syncwarp();
          fetch(queue, made.arrived[warp], list, first, lane);
        }
        wait_for_phase(shared_address(&made.arrived[warp]), turn++ % 2);
        taken = pick(queue, list, first, slots, range, lane);
        if (pass == 0) entries += __popc(taken);
      }
      // Four entries a lane at a time, so that their looks at the table are under way together.
      constexpr int batch = 4;
      u32 left = taken;
#pragma unroll 1
      while (!full && __any_sync(~0u, left != 0)) {
        int slot[batch], landed = 0;
        u32 at[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
          const u32 n = __ffs(left) - 1;
          slot[k] = left ? queue[(n & ~3u) * 32 + 4 * lane + (n & 3)] : -1;
          at[k] = home_of(slot[k]);
          left &= left - 1;
        }
        bool again = true;
#pragma unroll 1
        while (__any_sync(~0u, again)) {
          int found[batch];
#pragma unroll
          for (int k = 0; k < batch; ++k) found[k] = *const_cast<volatile int*>(table.slots + at[k]);
          // An atomic takes the time of several reads, so only where it would change something.
          if (pass == 0)
#pragma unroll
            for (int k = 0; k < batch; ++k)
              if (found[k] < slot[k]) found[k] = atomicMax(table.slots + at[k], slot[k]);
          again = false;
#pragma unroll
          for (int k = 0; k < batch; ++k) {
            const bool open = slot[k] >= 0, done = found[k] < 0 || found[k] == slot[k];
            landed += open && found[k] < 0;
            if (pass == 1 && open && done) list_in(table, at[k], list.row, level);
            if (pass == 0) slot[k] = min(slot[k], found[k]);
            if (done) slot[k] = -1;
            at[k] = (at[k] + 1) % cells;
            again |= slot[k] >= 0;
          }
        }
        if (pass == 0) {
          for (int step = 1; step < 32; step *= 2) landed += __shfl_xor_sync(~0u, landed, step);
          if (lane == 0) atomicAdd(&made.different, landed);
          __syncwarp();
          full = __any_sync(~0u, *const_cast<volatile int*>(&made.different) > capacity);
        }
      }
      __syncwarp();
    }
    __syncthreads();
    if (made.different > capacity) return {-1, false};
  }

  // The cells that are taken. Thread i has cells 4 i .. 4 i + 3 of each quarter, and so goes the order.
  constexpr int quarter = cells / 4;
  auto masks_of = [&](u32 (&masks)[4], int cell) {
    if (level == 0) {
      // Byte r of a word becomes bit 24 + r.
      const uint4 x = *reinterpret_cast<const uint4*>(&table.listed[cell]);
#pragma unroll
      for (int c = 0; c < 4; ++c) masks[c] = word(x, c) * 0x01020408 >> 24 & 15;
    } else {
      for (int c = 0; c < 4; ++c) masks[c] = mask_of(table.counts[cell + c], level);
    }
  };
  int own = 0, listed = 0;
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    u32 masks[4];
    masks_of(masks, k * quarter + threadIdx.x * 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      own += masks[c] != 0;
      listed += __popc(masks[c]);
    }
  }
  int to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, to, step);
    to += lane >= step ? below : 0;
    listed += __shfl_xor_sync(~0u, listed, step);
    entries += __shfl_xor_sync(~0u, entries, step);
  }
  if (lane == 31) made.found[warp] = to;
  if (lane == 0) atomicAdd(&made.remaining, (level == 0 ? entries : 0) - listed);
  to -= own;
  __syncthreads();
  int tokens = 0;
#pragma unroll
  for (int w = 0; w < union_warps; ++w) {
    to += w < warp ? made.found[w] : 0;
    tokens += made.found[w];
  }
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    const int cell = k * quarter + threadIdx.x * 4;
    const int4 x = *reinterpret_cast<const int4*>(table.slots + cell);
    const int slot[4] = {x.x, x.y, x.z, x.w};
    u32 masks[4];
    masks_of(masks, cell);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (masks[c]) {
        made.slots[to] = slot[c];
        made.masks[to++] = static_cast<unsigned char>(masks[c]);
      }
  }
  // No row lists what fills up the last tile.
  if (threadIdx.x < 32 && tokens + threadIdx.x < capacity) made.masks[tokens + threadIdx.x] = 0;
  // A row that lists a slot again has more entries than the levels so far took.
  const bool more = made.remaining > 0;
  // What was the table is the ring from here on.
  fence_before_bulk_copies();
  __syncthreads();
  return {tokens, more};
}
