// Memory that the ranks of a communicator share: a line for each rank, then two slots of data for each.
//
// A collective is a round, or several if its data exceed a slot. In a round each rank copies its data to a slot and
// counts itself as arrived. When all have arrived, it reads the slots of all. A rank arrives in round n + 1 only after
// it has read all slots of round n. When all have arrived in round n + 1, no rank reads the slots of round n any more.
// Two alternating slots therefore suffice.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "rules.h"

namespace hccl {

constexpr uint32_t MAX_RANKS = 64;
constexpr size_t LINE_BYTES = 256;

enum class Kind : uint32_t { all_reduce, all_gather, broadcast, barrier };

// What a rank calls: equal on all ranks.
struct Operation {
  Kind kind;
  uint32_t dtype, reduce, root;
  uint64_t count;
  bool operator==(const Operation &) const = default;
};

std::string describe(const Operation &operation);

struct Line {
  std::atomic<uint32_t> event;     // counts what the rank should look at; a futex
  std::atomic<uint32_t> joined;    // the fields below are set
  uint32_t ranks, device, aiv;
  uint64_t capacity;
  std::atomic<uint64_t> arrived;   // the last round in which the rank has shared its data
  std::atomic<uint64_t> wanted;    // the last round in which another rank waits for this one
  Operation operations[2];         // of the last two rounds
};
static_assert(sizeof(Line) <= LINE_BYTES && std::atomic<uint64_t>::is_always_lock_free);

// Shared memory of a communicator, as one of its ranks maps it. The file has no name: other processes open it through
// the process that created it.
class Channel {
 public:
  Channel() = default;
  ~Channel();
  Channel(const Channel &) = delete;

  // Returns the text by which processes of this machine open a new channel; "" if the machine refuses.
  static std::string create();

  // Opens the channel and waits until all ranks have joined with equal arguments. Returns "" or the refusal.
  std::string join(const std::string &address, uint32_t rank, uint32_t ranks, uint32_t device, uint64_t capacity,
                   bool aiv, int seconds);

  Line &line(uint32_t rank) { return *reinterpret_cast<Line *>(memory_ + rank * LINE_BYTES); }
  char *slot(uint32_t rank, uint64_t round) {
    return memory_ + MAX_RANKS * LINE_BYTES + (2 * rank + round % 2) * capacity_;
  }

  void signal(uint32_t rank);                                  // lets the rank look
  void wait(uint32_t rank, uint32_t seen, int64_t microseconds);  // for a signal after `seen`; -1: without limit

 private:
  std::string mismatch(uint32_t rank, uint32_t ranks);  // of the ranks that have joined; "" if there is none

  char *memory_ = nullptr;
  size_t bytes_ = 0;
  uint64_t capacity_ = 0;
};

}  // namespace hccl
