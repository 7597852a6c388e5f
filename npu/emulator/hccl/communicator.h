// Communicator: the ranks that call collectives together, as one of them sees it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "channel.h"

namespace hccl {

struct Settings {
  uint64_t capacity;  // bytes of a slot, HCCL_BUFFSIZE
  int seconds;        // for which a collective waits, HCCL_EXEC_TIMEOUT; 0: without limit
  bool aiv;           // collectives run on the vector cores, HCCL_OP_EXPANSION_MODE
};

// One round of a collective: `bytes` from `send` on are shared, and `receive` is given the slots of all ranks in their
// order. Runs on the device's thread only, as `share` and then `finish`.
class Communicator {
 public:
  // Returns the communicator once all ranks have joined; null with the refusal in `error`.
  static std::shared_ptr<Communicator> create(const std::string &address, uint32_t rank, uint32_t ranks,
                                              const std::string &name, const Settings &settings, int seconds,
                                              std::string *error);
  ~Communicator();
  void close();  // for HcclCommDestroy: its remaining tasks fail

  const uint32_t rank, ranks;
  const std::string name;
  const Settings settings;

  void share(const Operation &operation, const void *data, size_t bytes);
  bool may_finish();  // all have arrived, or the time is up
  void want();        // lets the others run the streams with their part of this round
  void finish(const Operation &operation);  // throws if a rank is missing or called another operation
  const char *slot(uint32_t of) { return channel_.slot(of, round_); }

 private:
  Communicator(uint32_t rank, uint32_t ranks, std::string name, Settings settings);
  void serve();  // body of the thread that other ranks signal
  int missing(); // the first rank that has not arrived in this round; -1: none

  Channel channel_;
  void *buffers_ = nullptr;           // device memory: one slot to send and one to receive
  std::atomic<uint64_t> round_{0};    // the last round that this rank has shared
  std::atomic<bool> open_{false};     // the round is not finished
  std::atomic<bool> closed_{false};
  bool wanted_ = false;               // the others know that this rank waits in this round
  std::atomic<std::chrono::steady_clock::time_point> end_;  // of the wait in this round
  std::thread server_;
};

}  // namespace hccl
